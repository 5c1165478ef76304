import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.errors import RoutingTraceError
from consistency.routing_replay import RoutingTraceBuilder, Segment

LAYERS = (1, 3)


def routes(tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, 2, 8, generator=generator).topk(2, dim=-1).indices


def builder(capacity=1):
    return RoutingTraceBuilder(LAYERS, 8, 2, capacity=capacity)


def test_a_generation_becomes_one_trace():
    building = builder()
    building.append(routes(5), position=0, weight_version=1, origin="prefilled")
    for step in range(4):
        building.append(
            routes(1, seed=step + 1), position=5 + step, weight_version=1, origin="generated"
        )
    building.append_invalid()
    trace = building.build()
    assert trace.segments == (Segment(0, 5, 1, "prefilled"), Segment(5, 9, 1, "generated"))
    assert trace.valid.tolist() == [True] * 9 + [False]
    assert torch.equal(trace.expert_ids[:5].to(torch.int64), routes(5))
    assert torch.equal(trace.expert_ids[6].to(torch.int64), routes(1, seed=2)[0])
    assert trace.expert_ids.dtype is torch.uint8


def test_a_built_trace_does_not_change_when_the_builder_goes_on():
    building = builder(capacity=8)
    building.append(routes(3), position=0, weight_version=1, origin="prefilled")
    trace = building.build()
    before = trace.to_bytes()
    building.append(routes(3, 1), position=0, weight_version=2, origin="re_prefilled")
    assert trace.to_bytes() == before


def test_rows_of_the_whole_sequence_cannot_be_added_again_on_resume():
    building = builder()
    building.append(routes(4), position=0, weight_version=1, origin="prefilled")
    for origin in ("generated", "prefilled", "cached"):
        with pytest.raises(RoutingTraceError, match="re_prefilled, which replaces"):
            building.append(routes(6), position=0, weight_version=1, origin=origin)
    assert len(building) == 4


def test_a_re_prefill_replaces_the_rows_and_says_so():
    building = builder()
    building.append(routes(4), position=0, weight_version=1, origin="prefilled")
    building.append(routes(3, seed=1), position=4, weight_version=1, origin="generated")
    building.append(routes(7, seed=2), position=0, weight_version=2, origin="re_prefilled")
    building.append(routes(1, seed=3), position=7, weight_version=2, origin="generated")
    trace = building.build()
    assert trace.tokens == 8
    assert trace.segments == (Segment(0, 7, 2, "re_prefilled"), Segment(7, 8, 2, "generated"))
    assert torch.equal(trace.expert_ids[:7].to(torch.int64), routes(7, seed=2))
    assert trace.tokens_of("re_prefilled") == 7


def test_a_re_prefill_in_chunks_replaces_chunk_by_chunk():
    building = builder()
    building.append(routes(6), position=0, weight_version=1, origin="prefilled")
    building.append(routes(2, seed=1), position=0, weight_version=2, origin="re_prefilled")
    assert building.build().segments == (
        Segment(0, 2, 2, "re_prefilled"),
        Segment(2, 6, 1, "prefilled"),
    )
    building.append(routes(2, seed=2), position=2, weight_version=2, origin="re_prefilled")
    building.append(routes(3, seed=3), position=4, weight_version=2, origin="re_prefilled")
    trace = building.build()
    assert trace.segments == (Segment(0, 7, 2, "re_prefilled"),)
    assert torch.equal(trace.expert_ids[2:4].to(torch.int64), routes(2, seed=2))


def test_a_re_prefill_in_the_middle_cuts_the_segment_around_it():
    building = builder()
    building.append(routes(6), position=0, weight_version=1, origin="prefilled")
    building.append(routes(2, seed=1), position=2, weight_version=2, origin="re_prefilled")
    assert building.build().segments == (
        Segment(0, 2, 1, "prefilled"),
        Segment(2, 4, 2, "re_prefilled"),
        Segment(4, 6, 1, "prefilled"),
    )


def test_a_preempted_sequence_is_truncated_and_computed_again():
    building = builder()
    building.append(routes(4), position=0, weight_version=1, origin="prefilled")
    building.append(routes(2, seed=1), position=4, weight_version=1, origin="generated")
    building.truncate(2)
    assert len(building) == 2
    building.append(routes(4, seed=2), position=2, weight_version=1, origin="re_prefilled")
    trace = building.build()
    assert trace.segments == (Segment(0, 2, 1, "prefilled"), Segment(2, 6, 1, "re_prefilled"))
    assert trace.valid.all()


def test_invalid_tokens_do_not_come_back_after_a_truncation():
    building = builder()
    building.append_invalid(2)
    building.truncate(0)
    building.append(routes(2), position=0, weight_version=0, origin="prefilled")
    building.truncate(1)
    building.append_invalid(1)
    assert building.build().valid.tolist() == [True, False]


def test_a_multi_turn_boundary_row_is_invalid_and_not_zero():
    building = builder()
    building.append(routes(3), position=0, weight_version=0, origin="generated")
    building.append_invalid()
    building.append(routes(2, seed=1), position=4, weight_version=0, origin="prefilled")
    trace = building.build()
    assert trace.valid.tolist() == [True, True, True, False, True, True]
    assert trace.segments == (Segment(0, 3, 0, "generated"), Segment(4, 6, 0, "prefilled"))


@pytest.mark.parametrize("position", [3, -1])
def test_a_gap_raises(position):
    building = builder()
    building.append(routes(2), position=0, weight_version=0, origin="prefilled")
    with pytest.raises(RoutingTraceError, match="position"):
        building.append(routes(1), position=position, weight_version=0, origin="re_prefilled")


@pytest.mark.parametrize(
    "ids", [routes(1)[:, :1], routes(1)[..., :1], routes(1)[0], routes(1) + 8, routes(1) - 9]
)
def test_rows_of_another_model_raise_and_leave_the_builder_as_it_was(ids):
    building = builder()
    building.append(routes(2), position=0, weight_version=0, origin="prefilled")
    before = building.build()
    with pytest.raises(RoutingTraceError):
        building.append(ids, position=2, weight_version=0, origin="generated")
    assert building.build() == before


def test_a_bad_segment_leaves_the_builder_as_it_was():
    building = builder()
    with pytest.raises(RoutingTraceError, match="weight_version"):
        building.append(routes(2), position=0, weight_version=-1, origin="prefilled")
    assert len(building) == 0
    assert building.build().tokens == 0


def test_truncating_what_is_not_there_raises():
    with pytest.raises(RoutingTraceError, match="truncate"):
        builder().truncate(1)


steps = st.lists(
    st.tuples(
        st.sampled_from(["generate", "re_prefill", "truncate", "invalid"]), st.integers(0, 9)
    ),
    max_size=14,
)


@settings(max_examples=40, deadline=None)
@given(steps)
def test_the_builder_agrees_with_a_list_of_rows(actions):
    building = builder()
    rows: list[tuple[list[list[int]], int, str] | None] = []
    for number, (action, amount) in enumerate(actions):
        count = amount % 4
        ids = routes(count, seed=number)
        if action == "generate":
            building.append(ids, position=len(rows), weight_version=number, origin="generated")
            rows += [(row.tolist(), number, "generated") for row in ids]
        elif action == "re_prefill":
            start = min(amount, len(rows))
            building.append(ids, position=start, weight_version=number, origin="re_prefilled")
            rows[start : start + count] = [(row.tolist(), number, "re_prefilled") for row in ids]
        elif action == "truncate":
            del rows[min(amount, len(rows)) :]
            building.truncate(len(rows))
        else:
            rows += [None] * count
            building.append_invalid(count)
    trace = building.build()
    assert trace.tokens == len(building) == len(rows)
    found: list[tuple[list[list[int]], int, str] | None] = [None] * len(rows)
    for part in trace.segments:
        for token in range(part.start, part.stop):
            if trace.valid[token]:
                ids = trace.expert_ids[token].tolist()
                found[token] = (ids, part.weight_version, part.origin)
    assert found == rows
