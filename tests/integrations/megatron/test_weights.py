"""All ranks together hold every element of the checkpoint, each where it belongs."""

from __future__ import annotations

import pytest
import torch

from integrations.megatron.weights import Place, parameter_pieces
from integrations.trainer.model.config import ModelConfig
from integrations.trainer.model.weights import checkpoint_shapes

SHAPE = ModelConfig(
    model_type="qwen3_moe",
    hidden_size=8,
    layers=4,
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
    moe_layers=(1, 2, 3),
)


def covered(shape: ModelConfig, places) -> dict[str, torch.Tensor]:
    """How often each element of the checkpoint is held by the given ranks."""
    counts = {name: torch.zeros(size) for name, size in checkpoint_shapes(shape).items()}
    for place in places:
        for pieces in parameter_pieces(shape, place).values():
            row = 0
            for piece in pieces:
                assert piece.row == row
                row += piece.shape[0]
                box = tuple(
                    slice(begin, begin + extent)
                    for begin, extent in zip(piece.start, piece.shape, strict=True)
                )
                assert counts[piece.tensor][box].shape == piece.shape
                counts[piece.tensor][box] += 1
    return counts


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("expert", [1, 2])
def test_all_ranks_together_hold_the_checkpoint(tensor, pipeline, expert):
    places = [
        Place(
            tensor_rank=t,
            tensor_size=tensor,
            pipeline_rank=p,
            pipeline_size=pipeline,
            expert_rank=e,
            expert_size=expert,
            expert_tensor_rank=t,
            expert_tensor_size=tensor,
        )
        for t in range(tensor)
        for p in range(pipeline)
        for e in range(expert)
    ]
    for name, count in covered(SHAPE, places).items():
        copies = 1 if ".experts." in name else expert
        if "norm" in name or name.endswith("mlp.gate.weight"):
            copies *= tensor
        assert torch.equal(count, torch.full_like(count, copies)), name


def test_heads_of_a_group_lie_together():
    pieces = parameter_pieces(SHAPE, Place(tensor_rank=1, tensor_size=2))
    found = pieces["decoder.layers.0.self_attention.linear_qkv.weight"]
    stem = "model.layers.0.self_attn"
    assert [(piece.tensor, piece.start[0], piece.shape[0]) for piece in found] == [
        (f"{stem}.q_proj.weight", 8, 4),
        (f"{stem}.k_proj.weight", 4, 2),
        (f"{stem}.v_proj.weight", 4, 2),
        (f"{stem}.q_proj.weight", 12, 4),
        (f"{stem}.k_proj.weight", 6, 2),
        (f"{stem}.v_proj.weight", 6, 2),
    ]


def test_the_last_stage_of_a_tied_model_holds_the_embedding_again():
    tied = ModelConfig.from_dict(SHAPE.to_dict() | {"tie_word_embeddings": True})
    alone = parameter_pieces(tied, Place())
    assert "output_layer.weight" not in alone
    last = parameter_pieces(tied, Place(pipeline_rank=1, pipeline_size=2))
    assert last["output_layer.weight"] == alone["embedding.word_embeddings.weight"]
