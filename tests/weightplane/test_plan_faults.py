"""Faults that weight transfers were seen to have, and where planning stops each of them.

The numbers are those of the list in the weight plane's guide.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

import weightplane
from tests.weightplane.planning import assert_holds, empty_arenas, filled_arenas, random_values
from weightplane.cluster_layout import ClusterLayout, RankLayout, Slice, Storage
from weightplane.errors import InvalidArgumentError, LayoutError, PlanError
from weightplane.execute import execute, pack, unpack
from weightplane.layout import Layout, TensorSpec
from weightplane.plan import PlanSettings, plan
from weightplane.sharding import RankBuilder


def rank(name, *specs):
    builder = RankBuilder(name)
    for spec in specs:
        builder.whole(spec)
    return ClusterLayout.build(builder.tensors, [builder.layout()])


W = TensorSpec("w", (4, 6), "bfloat16")
ROUTER = TensorSpec("router", (4, 8), "float32")


def test_fault_1_an_update_of_nothing_is_no_success():
    with pytest.raises(LayoutError, match="an empty update updates nothing"):
        ClusterLayout.build([], [RankLayout("rollout", (), ())])


def test_fault_1_a_tensor_that_the_trainer_lacks_is_named():
    with pytest.raises(PlanError, match="'router' is not held by the source"):
        plan(rank("trainer", W), rank("rollout", W, ROUTER))


def test_fault_1_a_tensor_that_nobody_wants_is_named_unless_it_is_allowed():
    with pytest.raises(PlanError, match="'router' is held by the source and wanted by nobody"):
        plan(rank("trainer", W, ROUTER), rank("rollout", W))
    allowed = plan(rank("trainer", W, ROUTER), rank("rollout", W), PlanSettings(allow_unused=True))
    assert allowed.wire_bytes == W.byte_count


def test_fault_2_memory_that_nobody_writes_is_refused_before_anything_is_sent():
    layout = ClusterLayout.build(
        [W], [RankLayout("rollout", (Storage("w", 0, 60),), (Slice("w", (0, 0), (4, 6), "w"),))]
    )
    expected = r"storage 'w' of rank 'rollout' has 12 bytes that no slice fills and declares 0"
    with pytest.raises(LayoutError, match=expected):
        plan(rank("trainer", W), layout)


def test_fault_2_a_slice_that_no_trainer_rank_holds_is_named():
    half = RankBuilder("trainer/0")
    half.cut(W, 1, 0, 2)
    source = ClusterLayout.build([W], [half.layout()])
    expected = (
        r"no source rank holds w\[0:4, 3:6\] \(in items of bfloat16\[4, 6\]\), which rank 'roll"
    )
    with pytest.raises(PlanError, match=expected):
        plan(source, rank("rollout", W))


def test_fault_3_packed_weights_are_packed_by_the_trainer_and_never_by_the_way():
    packed = TensorSpec("w", (4, 6), "float4_e2m1fn")
    with pytest.raises(PlanError, match=r"'w' is bfloat16\[4, 6\] at the source and float4_e2m1fn"):
        plan(rank("trainer", W), rank("rollout", packed))


def test_fault_5_a_router_in_another_dtype_is_refused_by_its_name():
    bf16 = TensorSpec("router", (4, 8), "bfloat16")
    expected = r"'router' is bfloat16\[4, 8\] at the source and float32\[4, 8\] at the destination"
    with pytest.raises(PlanError, match=expected):
        plan(rank("trainer", bf16), rank("rollout", ROUTER))


def test_fault_6_a_transposed_expert_arrives_transposed_once():
    gate, down = TensorSpec("gate", (3, 5), "bfloat16"), TensorSpec("down", (5, 3), "bfloat16")
    storages = (Storage("w1", 0, 30), Storage("w3", 64, 30))
    slices = (
        Slice("gate", (0, 0), (3, 5), "w1", 0, (2, 6)),
        Slice("down", (0, 0), (5, 3), "w3", 0, (6, 2)),
    )
    destination = ClusterLayout.build([gate, down], [RankLayout("rollout", storages, slices)])
    source = rank("trainer", gate, down)
    values = random_values(source, 1)
    arenas = empty_arenas(destination)
    execute(plan(source, destination), filled_arenas(source, values), arenas)
    w1 = arenas[0][:30].reshape(5, 3, 2)
    assert numpy.array_equal(w1, values["gate"].swapaxes(0, 1))
    assert numpy.array_equal(arenas[0][64:94].reshape(5, 3, 2), values["down"])


def test_fault_6_a_transposed_shape_is_refused():
    with pytest.raises(PlanError, match=r"bfloat16\[4, 6\] at the source and bfloat16\[6, 4\]"):
        plan(rank("trainer", W), rank("rollout", TensorSpec("w", (6, 4), "bfloat16")))


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_fault_7_whole_experts_are_not_cut_by_the_tensor_parallel_rank(tensor_parallel):
    experts = [TensorSpec(f"expert.{number}", (8, 4), "bfloat16") for number in range(4)]
    ranks = []
    for number in range(2 * tensor_parallel):
        builder = RankBuilder(f"rollout/{number}")
        for spec in experts[number // tensor_parallel :: 2]:
            builder.whole(spec)
        ranks.append(builder.layout())
    destination = ClusterLayout.build(experts, ranks)
    source = rank("trainer", *experts)
    made = plan(source, destination)
    values = random_values(source, 2)
    arenas = empty_arenas(destination)
    execute(made, filled_arenas(source, values), arenas)
    assert_holds(destination, arenas, values)
    assert made.wire_bytes == 4 * 64 * tensor_parallel


def test_fault_8_padding_of_the_vocabulary_is_no_part_of_the_tensor():
    table = TensorSpec("embed", (50, 4), "bfloat16")

    def side(name, size, padded_rows):
        ranks = []
        for number in range(size):
            builder = RankBuilder(f"{name}/{number}")
            builder.vocabulary(table, number, size, padded_rows)
            ranks.append(builder.layout())
        return ClusterLayout.build([table], ranks)

    made = plan(side("trainer", 4, 128), side("rollout", 2, 64))
    assert made.wire_bytes == table.byte_count
    assert [part.fills for part in map(made.part, range(4, 6))] == [(), ((18 * 8, 14 * 8),)]
    with pytest.raises(PlanError, match=r"bfloat16\[64, 4\] at the source and bfloat16\[50, 4\]"):
        plan(rank("trainer", TensorSpec("embed", (64, 4), "bfloat16")), side("rollout", 2, 64))


def test_fault_13_no_check_disappears_when_python_optimises():
    folder = Path(weightplane.__file__).parent
    found = [
        f"{file.name}:{node.lineno}"
        for file in folder.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assert)
    ]
    assert found == []


def test_fault_13_rank_zero_is_a_rank():
    made = plan(rank("trainer", W), rank("rollout", W))
    assert made.part(0).name == "trainer" and len(made.part(0).sends) == 1
    assert made.part(1).name == "rollout" and len(made.part(1).receives) == 1
    for endpoint in (-1, 2):
        with pytest.raises(InvalidArgumentError, match=f"endpoint is {endpoint}; there are 2"):
            made.part(endpoint)


def test_two_slices_that_write_the_same_bytes_are_refused_by_name():
    two = [TensorSpec("a", (4,), "int8"), TensorSpec("b", (4,), "int8")]
    slices = (Slice("a", (0,), (4,), "s"), Slice("b", (0,), (4,), "s", 3))
    layout = ClusterLayout.build(two, [RankLayout("rollout", (Storage("s", 0, 7),), slices)])
    with pytest.raises(LayoutError, match=r"a\[0:4\].* and b\[0:4\].* write the same bytes"):
        plan(rank("trainer", *two), layout)


def test_a_chunk_that_is_cut_short_is_refused():
    made = plan(rank("trainer", W), rank("rollout", W))
    work = made.part(1).receives[0]
    wire = pack(numpy.zeros(64, numpy.uint8), made.part(0).sends[0])
    with pytest.raises(InvalidArgumentError, match="chunk 0 has 48 bytes"):
        unpack(numpy.zeros(64, numpy.uint8), work, wire[:-1])


def test_a_dead_source_has_its_chunks_read_from_a_replica_that_holds_them():
    source = ClusterLayout.concatenate([rank(f"trainer/{number}", W) for number in range(3)])
    made = plan(source, rank("rollout", W), PlanSettings(chunk_bytes=16))
    values = random_values(source, 3)
    arenas = filled_arenas(source, values)
    for chunk in range(len(made.chunk_bytes)):
        assert made.source_holders(chunk) == (0, 1, 2)
        reads = [pack(arenas[holder], made.reader(holder, chunk)) for holder in (0, 1, 2)]
        assert numpy.array_equal(reads[0], reads[1]) and numpy.array_equal(reads[0], reads[2])


def test_load_is_shared_by_the_replicas_of_the_source():
    specs = [TensorSpec(f"w{number}", (64, 64), "float32") for number in range(9)]
    source = ClusterLayout.concatenate([rank(f"trainer/{number}", *specs) for number in range(4)])
    made = plan(source, rank("rollout", *specs), PlanSettings(chunk_bytes=1 << 13))
    egress = made.egress_bytes[:4]
    assert int(egress.sum()) == made.minimum_bytes
    assert egress.max() / egress.mean() <= 1.05


def test_a_late_joiner_gets_everything_from_its_peers():
    first = ClusterLayout.concatenate([rank("rollout/0", W, ROUTER), rank("rollout/1", W, ROUTER)])
    made = plan(first, rank("rollout/2", W, ROUTER))
    assert made.wire_bytes == W.byte_count + ROUTER.byte_count


def test_a_whole_layout_of_one_holder_is_a_side_too():
    layout = Layout.whole([W, ROUTER, TensorSpec("scalar", (), "int64")])
    side = ClusterLayout.of_layouts({"a": layout})
    assert int(side.arena_bytes[0]) == layout.size
    made = plan(side, ClusterLayout.of_layouts({"b": layout}))
    assert made.wire_bytes == layout.byte_count


@pytest.mark.parametrize(
    ("piece", "reason"),
    [
        (Slice("w", (0, 0), (5, 6), "w"), "no box inside its tensor"),
        (Slice("w", (-1, 0), (4, 6), "w"), "no box inside its tensor"),
        (Slice("w", (0, 0), (4, 6), "w", 2), "reaches beyond its storage"),
        (Slice("w", (0, 0), (4, 6), "w", 0, (12, 0)), "strides that are not positive"),
        (Slice("w", (0,), (4,), "w"), "one entry per dimension"),
        (Slice("w", (0, 0), (4, 6), "x"), "which the layout does not name"),
        (Slice("v", (0, 0), (4, 6), "w"), "which the layout does not name"),
    ],
)
def test_an_impossible_slice_is_refused(piece, reason):
    with pytest.raises(LayoutError, match=reason):
        ClusterLayout.build([W], [RankLayout("rollout", (Storage("w", 0, 48),), (piece,))])


def test_a_packed_weight_is_never_cut_inside_a_byte():
    packed = TensorSpec("p", (2, 8), "float4_e2m1fn")
    with pytest.raises(LayoutError, match="cuts a byte of two elements in half"):
        ClusterLayout.build(
            [packed],
            [RankLayout("r", (Storage("p", 0, 4),), (Slice("p", (0, 3), (2, 4), "p"),))],
        )


@pytest.mark.parametrize("document", [b"", b"[]", b'{"tensors": [], "ranks": []}', b"\xff"])
def test_what_is_no_layout_is_refused_with_one_error(document):
    with pytest.raises(LayoutError):
        ClusterLayout.from_json(document)


@pytest.mark.parametrize("field", ["chunk_bytes", "relay_fan_out", "ranks_per_host"])
def test_settings_that_make_no_plan_are_refused_by_name(field):
    with pytest.raises(InvalidArgumentError, match=f"{field} is 0; use at least 1"):
        replace(PlanSettings(), **{field: 0})
