"""Plans: minimum bytes, whole and equal destinations, the same on every rank."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.weightplane.planning import (
    assert_holds,
    assert_well_ordered,
    empty_arenas,
    filled_arenas,
    needed_bytes,
    random_sides,
    random_values,
)
from weightplane.cluster_layout import ClusterLayout
from weightplane.execute import execute, pack
from weightplane.plan import Plan, PlanSettings, plan

settings_of_plans = st.builds(
    PlanSettings,
    chunk_bytes=st.sampled_from([1, 7, 64, 1 << 20]),
    relay=st.just(True),
    relay_fan_out=st.integers(1, 3),
    ranks_per_host=st.integers(1, 4),
    allow_unused=st.just(True),
)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**9), chosen=settings_of_plans)
def test_any_destination_gets_exactly_its_slices_for_the_minimum_of_bytes(seed, chosen):
    source, destination = random_sides(seed)
    made = plan(source, destination, chosen)
    values = random_values(source, seed)
    arenas = empty_arenas(destination)
    execute(made, filled_arenas(source, values), arenas)
    assert_holds(destination, arenas, values)
    total, once = needed_bytes(destination)
    assert made.wire_bytes == made.minimum_bytes == total
    assert int(made.egress_bytes[: source.size].sum()) == made.minimum_egress_bytes == once
    assert_well_ordered(made)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_every_rank_computes_the_same_plan_from_the_layouts_it_was_sent(seed):
    source, destination = random_sides(seed)
    chosen = PlanSettings(chunk_bytes=16, allow_unused=True)
    made = plan(source, destination, chosen)
    again = plan(
        ClusterLayout.from_json(source.to_json()),
        ClusterLayout.from_json(destination.to_json()),
        chosen,
    )
    assert again == made
    assert again.to_json() == made.to_json()
    assert Plan.from_json(made.to_json()) == made


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_without_relays_the_bytes_are_the_same_and_the_trainer_sends_all_of_them(seed):
    source, destination = random_sides(seed)
    made = plan(source, destination, PlanSettings(relay=False, allow_unused=True))
    values = random_values(source, seed)
    arenas = empty_arenas(destination)
    execute(made, filled_arenas(source, values), arenas)
    assert_holds(destination, arenas, values)
    assert made.wire_bytes == made.minimum_bytes == needed_bytes(destination)[0]
    assert int(made.egress_bytes[source.size :].sum()) == 0
    assert_well_ordered(made)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_a_chunk_reads_the_same_from_everybody_who_holds_it(seed):
    source, destination = random_sides(seed)
    made = plan(source, destination, PlanSettings(chunk_bytes=32, allow_unused=True))
    values = random_values(source, seed)
    arenas = [*filled_arenas(source, values), *filled_arenas(destination, values)]
    for chunk in range(len(made.chunk_bytes)):
        holders = (*made.source_holders(chunk), *made.destination_holders(chunk))
        read = [pack(arenas[holder], made.reader(holder, chunk)) for holder in holders]
        assert all(numpy.array_equal(read[0], other) for other in read[1:])


def test_a_plan_that_was_tampered_with_is_refused():
    source, destination = random_sides(3)
    document = plan(source, destination, PlanSettings(allow_unused=True)).to_json()
    begin = document.index(b'"hop_round":[') + len(b'"hop_round":[')
    changed = document[:begin] + b"9" + document[begin:]
    with pytest.raises(ValueError, match="hop_round is not what its layouts lead to"):
        Plan.from_json(changed)
