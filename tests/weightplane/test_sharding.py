"""Kinds of sharding: what arrives equals what the same cut of the whole tensors gives."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from tests.weightplane.planning import assert_holds, empty_arenas, filled_arenas, random_values
from weightplane.cluster_layout import ClusterLayout
from weightplane.errors import LayoutError, PlanError
from weightplane.execute import execute
from weightplane.layout import TensorSpec
from weightplane.module_layout import local_box, module_layout
from weightplane.plan import PlanSettings, plan
from weightplane.sharding import RankBuilder, chunk, flat_range

HEAD = 4
SPECS = {
    spec.name: spec
    for spec in (
        TensorSpec("embed", (50, 16), "bfloat16"),
        TensorSpec("q", (8 * HEAD, 16), "bfloat16"),
        TensorSpec("k", (2 * HEAD, 16), "bfloat16"),
        TensorSpec("v", (2 * HEAD, 16), "bfloat16"),
        TensorSpec("q.bias", (8 * HEAD,), "bfloat16"),
        TensorSpec("k.bias", (2 * HEAD,), "bfloat16"),
        TensorSpec("v.bias", (2 * HEAD,), "bfloat16"),
        TensorSpec("o", (16, 8 * HEAD), "bfloat16"),
        TensorSpec("gate", (24, 16), "bfloat16"),
        TensorSpec("up", (24, 16), "bfloat16"),
        TensorSpec("down", (16, 24), "bfloat16"),
        TensorSpec("packed", (8, 64), "float4_e2m1fn"),
        TensorSpec("scales", (8, 2), "float8_e8m0fnu"),
        TensorSpec("router", (4, 16), "float32"),
        TensorSpec("buffer", (), "int64"),
    )
}


def rank_of(name, rank, size, grouped, interleaved, padded_rows):
    builder = RankBuilder(name)
    builder.vocabulary(SPECS["embed"], rank, size, padded_rows)
    builder.qkv("qkv", SPECS["q"], SPECS["k"], SPECS["v"], HEAD, rank, size, grouped)
    biases = (SPECS["q.bias"], SPECS["k.bias"], SPECS["v.bias"])
    builder.qkv("qkv.bias", *biases, HEAD, rank, size, grouped)
    builder.cut(SPECS["o"], 1, rank, size)
    builder.gate_up("gate_up", SPECS["gate"], SPECS["up"], rank, size, interleaved)
    builder.cut(SPECS["down"], 1, rank, size)
    builder.cut(SPECS["packed"], 0, rank, size)
    builder.cut(SPECS["scales"], 0, rank, size)
    builder.whole(SPECS["router"])
    builder.whole(SPECS["buffer"])
    return builder.layout()


def side(name, size, grouped, interleaved, padded_rows):
    ranks = [
        rank_of(f"{name}/{rank}", rank, size, grouped, interleaved, padded_rows)
        for rank in range(size)
    ]
    return ClusterLayout.build(tuple(SPECS.values()), ranks)


def deliver(source, destination, **chosen):
    made = plan(source, destination, PlanSettings(**chosen))
    values = random_values(source, 5)
    arenas = empty_arenas(destination)
    execute(made, filled_arenas(source, values), arenas)
    assert_holds(destination, arenas, values)
    return made


@pytest.mark.parametrize("source_size", [1, 4, 8])
@pytest.mark.parametrize("size", [1, 2, 8])
def test_any_tensor_parallel_size_reaches_any_other(source_size, size):
    source = side(
        "trainer", source_size, True, False, -(-50 // (8 * source_size)) * 8 * source_size
    )
    destination = side("rollout", size, False, True, 64 if size < 8 else 128)
    deliver(source, destination, chunk_bytes=512)


def test_key_value_heads_that_neighbours_share_come_from_either_of_them():
    source = side("trainer", 8, False, False, 64)
    made = deliver(source, side("rollout", 1, False, False, 64), chunk_bytes=64)
    chunks = [
        chunk
        for chunk in range(len(made.chunk_bytes))
        if made.destination.tensors[int(made.cell_tensor[made.chunk_cells[chunk]])].name == "k"
    ]
    assert {len(made.source_holders(chunk)) for chunk in chunks} == {4}


def test_vocabulary_padding_is_never_sent_and_is_zero_on_arrival():
    source = side("trainer", 2, True, False, 128)
    destination = side("rollout", 4, True, False, 64)
    made = deliver(source, destination)
    rows = made.cell_shape[[made.destination.tensors[t].name == "embed" for t in made.cell_tensor]]
    assert int(rows.prod(axis=1).sum()) == 50 * 16
    assert sum(s.padding_bytes for r in range(4) for s in destination.storages(r)) == 14 * 16 * 2


@settings(max_examples=60, deadline=None)
@given(shape=st.lists(st.integers(1, 5), max_size=4), data=st.data())
def test_a_flat_range_is_made_of_boxes_in_its_own_order(shape, data):
    whole = torch.arange(math.prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    boxes = flat_range(shape, start, stop)
    read = [
        whole[tuple(slice(a, a + n) for a, n in zip(low, extent, strict=True))].reshape(-1)
        for low, extent in boxes
    ]
    found = torch.cat(read) if read else whole.reshape(-1)[:0]
    assert torch.equal(found, whole.reshape(-1)[start:stop])
    assert len(boxes) <= max(1, 2 * len(shape))


def test_flat_shards_of_a_sharded_optimizer_reach_tensor_parallel_ranks():
    specs = [TensorSpec("w", (7, 5, 3), "float32"), TensorSpec("u", (11,), "bfloat16")]
    ranks = []
    for rank in range(4):
        builder = RankBuilder(f"trainer/{rank}")
        for spec in specs:
            builder.flat(spec, *chunk(math.prod(spec.shape), rank, 4))
        ranks.append(builder.layout())
    whole = RankBuilder("rollout")
    for spec in specs:
        whole.whole(spec)
    deliver(ClusterLayout.build(specs, ranks), ClusterLayout.build(specs, [whole.layout()]))


@pytest.fixture
def fake_world(monkeypatch):
    from torch.distributed import destroy_process_group, init_process_group
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def enter(rank, size):
        init_process_group("fake", rank=rank, world_size=size, store=FakeStore())

    yield enter, destroy_process_group


@pytest.mark.parametrize(
    "placements",
    [
        (Shard(0), Shard(0)),
        (Shard(0), Shard(1)),
        (Replicate(), Shard(1)),
        (Shard(1), Replicate()),
        (Shard(0), Replicate()),
    ],
)
def test_dtensor_boxes_are_where_torch_puts_the_elements(fake_world, placements):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    enter, leave = fake_world
    whole = torch.arange(7 * 5, dtype=torch.float32).reshape(7, 5)
    layouts = []
    for rank in range(6):
        enter(rank, 6)
        try:
            mesh = init_device_mesh("cpu", (2, 3))
            held = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            coordinate = mesh.get_coordinate() or ()
            start, shape = local_box(TensorSpec.of("w", whole), (2, 3), coordinate, placements)
            cut = whole[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))]
            assert torch.equal(held.to_local(), cut)
            module = nn.Module()
            # A buffer, because torch's cache of operations on DTensors keeps the mesh of the rank
            # that this process was before.
            module.register_buffer("w", held)
            if cut.numel():
                layouts.append(module_layout(module, f"trainer/{rank}"))
        finally:
            leave()
    source = ClusterLayout.concatenate(layouts)
    whole_rank = RankBuilder("rollout")
    whole_rank.whole(TensorSpec("w", (7, 5), "float32"))
    deliver(source, ClusterLayout.build(whole_rank.tensors, [whole_rank.layout()]))


def test_fully_sharded_over_tensor_parallel_cuts_the_tensor_parallel_share():
    from torch.distributed.tensor.placement_types import _StridedShard

    spec = TensorSpec("w", (16, 2), "float32")
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    starts = [
        local_box(spec, (2, 2), (fsdp, tp), placements)[0] for fsdp in (0, 1) for tp in (0, 1)
    ]
    assert starts == [(0, 0), (8, 0), (4, 0), (12, 0)]


def test_a_partial_tensor_has_no_slices():
    with pytest.raises(LayoutError, match=r"'w' has placement .* redistribute it first"):
        local_box(TensorSpec("w", (4,), "float32"), (2,), (0,), (Partial(),))


class Tied(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6)
        self.register_buffer("scale", torch.ones(()))
        if tied:
            self.head.weight = self.embed.weight


def test_tied_weights_are_sent_once_and_untied_copies_are_both_filled():
    tied, untied = module_layout(Tied(True), "trainer"), module_layout(Tied(False), "rollout")
    assert tied.ties == (("head.weight", "embed.weight"),)
    made = plan(tied, untied)
    assert made.wire_bytes == (6 * 4 + 6 + 1) * 4
    values = random_values(tied, 1)
    arenas = empty_arenas(untied)
    execute(made, filled_arenas(tied, values), arenas)
    assert_holds(untied, arenas, {**values, "head.weight": values["embed.weight"]})
    assert plan(tied, module_layout(Tied(True), "rollout")).wire_bytes == made.wire_bytes


def test_a_transformers_module_with_tied_embeddings_is_described_whole():
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=32, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    layout = module_layout(model, "trainer")
    assert layout.ties == (("lm_head.weight", "model.embed_tokens.weight"),)
    held = {spec.name for spec in layout.tensors} | {"lm_head.weight"}
    assert held == set(model.state_dict())
    assert plan(layout, module_layout(model, "rollout")).wire_bytes == sum(
        parameter.numel() * parameter.element_size() for parameter in model.parameters()
    )


def test_weights_that_only_the_engine_ties_are_refused():
    with pytest.raises(
        PlanError, match=r"ties 'head\.weight' to 'embed\.weight', the source holds"
    ):
        plan(module_layout(Tied(False), "trainer"), module_layout(Tied(True), "rollout"))


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda b: b.cut(SPECS["gate"], 0, 0, 5), "extent 24, which 5 ranks do not divide"),
        (lambda b: b.cut(SPECS["gate"], 0, 4, 4), "rank is 4, but there are 4"),
        (lambda b: b.rows("x", [(SPECS["q"], 0, 1), (SPECS["o"], 0, 1)]), "does not fit into 'x'"),
        (lambda b: b.vocabulary(SPECS["embed"], 0, 2, 48), "has 50 rows, padded are 48"),
        (lambda b: b.flat(SPECS["packed"], 0, 3), "packed weights are not cut flat"),
    ],
)
def test_an_impossible_cut_is_refused(build, reason):
    with pytest.raises(LayoutError, match=reason):
        build(RankBuilder("rank"))
