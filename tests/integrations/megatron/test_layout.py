"""Layouts of Megatron-Core ranks: plans from them fill an engine that holds the whole model."""

from __future__ import annotations

import numpy
import pytest
import torch

from integrations.errors import SwapError
from integrations.megatron.layout import fill_arena, ranks_layout
from integrations.megatron.weights import Place, parameter_pieces
from integrations.trainer.model.config import ModelConfig
from integrations.trainer.model.weights import checkpoint_shapes
from weightplane import Layout, TensorSpec
from weightplane.cluster_layout import ClusterLayout
from weightplane.execute import execute
from weightplane.plan import plan

SHAPE = ModelConfig(
    model_type="qwen3_moe",
    hidden_size=8,
    layers=2,
    heads=8,
    kv_heads=4,
    head_dim=2,
    intermediate_size=16,
    vocab_size=32,
    max_positions=16,
    qk_norm=True,
    experts=4,
    experts_per_token=2,
    moe_intermediate_size=8,
    moe_layers=(1,),
)
PLACES = {
    "alone": [Place()],
    "tensor": [
        Place(tensor_rank=r, tensor_size=4, expert_tensor_rank=r, expert_tensor_size=4)
        for r in range(4)
    ],
    "pipeline": [Place(pipeline_rank=r, pipeline_size=2) for r in range(2)],
    "tensor and expert": [
        Place(tensor_rank=r, tensor_size=2, expert_rank=r, expert_size=2) for r in range(2)
    ],
}


class Parameters(torch.nn.Module):
    """A rank's parameters by Megatron-Core's names, cut from whole tensors."""

    def __init__(self, shape: ModelConfig, place: Place, values) -> None:
        super().__init__()
        self.held = {}
        for name, pieces in parameter_pieces(shape, place).items():
            boxes = [
                values[p.tensor][
                    tuple(slice(s, s + n) for s, n in zip(p.start, p.shape, strict=True))
                ]
                for p in pieces
            ]
            self.held[name] = torch.nn.Parameter(torch.cat(boxes))

    def named_parameters(self, *_, **__):
        return iter(self.held.items())


@pytest.mark.parametrize("ways", PLACES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_plan_moves_every_rank_s_part_into_a_whole_engine(ways, tied):
    shape = ModelConfig.from_dict(SHAPE.to_dict() | {"tie_word_embeddings": tied})
    generator = torch.Generator().manual_seed(0)
    values = {
        name: torch.randn(size, generator=generator).to(torch.bfloat16)
        for name, size in checkpoint_shapes(shape).items()
    }
    places = {f"trainer/{index}": place for index, place in enumerate(PLACES[ways])}
    source = ranks_layout(shape, places)
    arenas = [
        fill_arena(Parameters(shape, place, values), source, rank) for rank, place in places.items()
    ]
    whole = Layout.whole(TensorSpec.of(name, value) for name, value in values.items())
    destination = ClusterLayout.of_layouts({"engine": whole})
    landed = [numpy.zeros(int(destination.arena_bytes[0]), numpy.uint8)]
    execute(plan(source, destination), arenas, landed)
    for storage, shard in zip(destination.storages(0), whole.shards, strict=True):
        piece = landed[0][storage.offset : storage.offset + storage.byte_count].copy()
        got = torch.from_numpy(piece).view(torch.bfloat16).view(shard.shape)
        assert torch.equal(got, values[shard.tensor]), shard.tensor


def test_a_model_that_is_not_the_layout_s_is_refused():
    values = {name: torch.zeros(size).bfloat16() for name, size in checkpoint_shapes(SHAPE).items()}
    layout = ranks_layout(SHAPE, {"trainer/0": PLACES["tensor"][0]})
    with pytest.raises(SwapError, match="rank 'trainer/1' is not in the layout"):
        fill_arena(Parameters(SHAPE, Place(), values), layout, "trainer/1")
    with pytest.raises(SwapError, match=r"word_embeddings.weight is 512 bytes, .* wants 128"):
        fill_arena(Parameters(SHAPE, Place(), values), layout, "trainer/0")
