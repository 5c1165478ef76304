"""Simulated time against what bandwidth allows, and the layouts of the paper model."""

from __future__ import annotations

import dataclasses

import numpy
import pytest

from tests.weightplane.planning import assert_holds, empty_arenas, filled_arenas, random_values
from weightplane.errors import InvalidArgumentError, LayoutError
from weightplane.execute import execute
from weightplane.paper_models import (
    PaperModel,
    RolloutRanks,
    TrainerRanks,
    rollout_layout,
    trainer_layout,
)
from weightplane.plan import PlanSettings, plan
from weightplane.simulate import Cluster, simulate

SMALL = PaperModel(
    layers=3, dense_layers=1, experts=8, hidden=256, intermediate=256, dense_intermediate=512,
    heads=4, query_rank=128, key_value_rank=128, rope=64, head=64, vocabulary=512,
)  # fmt: skip


@pytest.fixture(scope="module")
def trillion():
    return plan(trainer_layout(PaperModel()), rollout_layout(PaperModel()))


def test_a_trillion_parameters_move_at_the_minimum_and_near_the_bandwidth_bound(trillion):
    sources = trillion.source.size
    egress = trillion.egress_bytes[:sources]
    assert (sources, trillion.destination.size) == (256, 128)
    assert trillion.wire_bytes == trillion.minimum_bytes
    assert int(egress.sum()) == trillion.minimum_egress_bytes
    assert egress.max() / egress.mean() <= 1.05
    assert simulate(trillion).seconds <= 1.1 * simulate(trillion).bound_seconds


def test_the_wire_bytes_of_the_trillion_parameters_are_what_the_ranks_need(trillion):
    table, layout = trillion.destination.slice_table, trillion.destination
    needed = table.shape.prod(axis=1) * layout.item_bytes[table.tensor]
    assert trillion.wire_bytes == int(needed.sum())
    per_rank = numpy.bincount(table.rank, needed, minlength=layout.size)
    assert numpy.array_equal(trillion.ingress_bytes[trillion.source.size :], per_rank)


@pytest.mark.parametrize("form", ["bf16", "fp8", "mxfp4"])
def test_a_small_model_of_every_format_arrives_whole(form):
    model = dataclasses.replace(SMALL, format=form)
    source = trainer_layout(model, TrainerRanks(pipeline=2, expert=4))
    destination = rollout_layout(model, RolloutRanks(tensor=2, expert=2, replicas=2))
    made = plan(source, destination, PlanSettings(chunk_bytes=1 << 16))
    values = random_values(source, 7)
    arenas = empty_arenas(destination)
    execute(made, filled_arenas(source, values), arenas)
    assert_holds(destination, arenas, values)
    assert made.wire_bytes == made.minimum_bytes
    assert int(made.egress_bytes[: source.size].sum()) == made.minimum_egress_bytes


def test_packed_experts_take_little_more_than_a_quarter_of_the_bytes():
    def expert_bytes(form):
        model = dataclasses.replace(SMALL, format=form)
        layout = rollout_layout(model, RolloutRanks(tensor=2, expert=2))
        made = plan(trainer_layout(model, TrainerRanks(1, 4)), layout)
        names = [layout.tensors[tensor].name for tensor in made.cell_tensor.tolist()]
        experts = numpy.array([".experts." in name for name in names])
        return int(made.cell_bytes[experts].sum())

    assert expert_bytes("mxfp4") / expert_bytes("bf16") == (1 / 2 + 1 / 32) / 2 <= 0.27


def test_a_rollout_that_the_model_cannot_be_cut_for_is_refused():
    with pytest.raises(LayoutError, match="heads is 4, which tensor = 3 does not divide"):
        rollout_layout(SMALL, RolloutRanks(tensor=3, expert=2))


def test_more_replicas_take_nothing_more_from_the_trainer():
    source = trainer_layout(SMALL, TrainerRanks(pipeline=1, expert=4))
    settings = PlanSettings(chunk_bytes=1 << 16)
    one, four = (
        plan(source, rollout_layout(SMALL, RolloutRanks(2, 2, replicas)), settings)
        for replicas in (1, 4)
    )
    assert four.egress_bytes[:4].sum() == one.egress_bytes[:4].sum()
    assert four.wire_bytes == 4 * one.wire_bytes


def test_relays_save_the_time_that_copies_for_every_replica_would_take():
    source = trainer_layout(SMALL, TrainerRanks(pipeline=1, expert=4))
    destination = rollout_layout(SMALL, RolloutRanks(2, 2, replicas=8))
    cluster = Cluster(ranks_per_host=4, nics_per_host=4, hop_seconds=0.0)
    relayed, direct = (
        simulate(plan(source, destination, PlanSettings(1 << 16, relay=relay)), cluster)
        for relay in (True, False)
    )
    assert relayed.seconds < direct.seconds / 2


def test_nothing_is_faster_than_the_bandwidth_bound():
    source = trainer_layout(SMALL, TrainerRanks(pipeline=2, expert=4))
    destination = rollout_layout(SMALL, RolloutRanks(2, 2, replicas=3))
    for chunk_bytes in (1 << 14, 1 << 16, 1 << 20):
        settings = PlanSettings(chunk_bytes, ranks_per_host=2)
        found = simulate(plan(source, destination, settings), Cluster(2, 1))
        assert 0 < found.bandwidth_fraction <= 1
        edges, shares = found.busy_fraction(receivers=True)
        hops = float((found.end - found.begin - found.cluster.hop_seconds).sum())
        assert float((shares.sum(axis=0) * numpy.diff(edges)).sum() * 12) == pytest.approx(hops)


def test_one_chunk_between_two_hosts_takes_latency_and_bytes_over_the_rate():
    source = trainer_layout(SMALL, TrainerRanks(pipeline=1, expert=1))
    destination = rollout_layout(SMALL, RolloutRanks(1, 1))
    made = plan(source, destination, PlanSettings(chunk_bytes=1 << 40))
    assert len(made.hop_chunk) == 1
    found = simulate(made, Cluster(4, 2, nic_bytes_per_second=1e9, hop_seconds=0.5))
    assert found.seconds == pytest.approx(0.5 + made.wire_bytes / 0.5e9)


@pytest.mark.parametrize(
    ("field", "value"),
    [("ranks_per_host", 0), ("nic_bytes_per_second", 0.0), ("nic_bytes_per_second", float("nan")),
     ("hop_seconds", -1.0)],
)  # fmt: skip
def test_an_impossible_cluster_is_refused_by_its_field(field, value):
    with pytest.raises(InvalidArgumentError, match=field):
        Cluster(**{field: value})


@pytest.mark.parametrize(
    ("model", "ranks", "reason"),
    [
        (SMALL, TrainerRanks(expert=3), "experts is 8, which expert = 3 does not divide"),
        (SMALL, TrainerRanks(pipeline=4, expert=4), "pipeline is 4; use 1 to 3"),
        (SMALL, TrainerRanks(pipeline=1, expert=0), "expert = 0"),
    ],
)
def test_ranks_that_the_model_cannot_be_cut_for_are_refused(model, ranks, reason):
    with pytest.raises(LayoutError, match=reason):
        trainer_layout(model, ranks)


def test_an_unknown_format_is_refused():
    with pytest.raises(LayoutError, match="format is 'int4'; use one of bf16, fp8, mxfp4"):
        PaperModel(format="int4")
