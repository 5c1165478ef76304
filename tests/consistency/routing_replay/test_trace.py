import dataclasses
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.errors import InvalidInputError, RoutingTraceError
from consistency.routing_replay import Origin, RoutingTrace, Segment, concatenate, expert_dtype

LAYERS = (1, 3)


def routes(tokens, layers=2, topk=2, experts=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, layers, experts, generator=generator)
    return scores.topk(topk, dim=-1).indices


def trace(tokens=4, *, experts=8, version=5, origin: Origin = "generated", seed=0, valid=None):
    return RoutingTrace.of(
        routes(tokens, experts=experts, seed=seed),
        layers=LAYERS,
        experts=experts,
        weight_version=version,
        origin=origin,
        valid=valid,
    )


@pytest.mark.parametrize(
    ("experts", "dtype"),
    [(1, torch.uint8), (256, torch.uint8), (257, torch.uint16), (65536, torch.uint16)],
)
def test_ids_take_the_smallest_unsigned_dtype(experts, dtype):
    assert expert_dtype(experts) is dtype


@pytest.mark.parametrize("experts", [0, -1, 65537, True, 8.0])
def test_a_number_of_experts_that_cannot_be_raises(experts):
    with pytest.raises(RoutingTraceError, match="experts"):
        expert_dtype(experts)


def test_uint16_ids_are_never_promoted_to_int64():
    wide = trace(6, experts=300)
    for kept in (
        wide,
        wide.slice(1, 3),
        concatenate((wide, wide)),
        wide.padded(9),
        wide.extended(routes(1, experts=300), weight_version=6, origin="generated"),
        RoutingTrace.from_bytes(wide.to_bytes()),
    ):
        assert kept.expert_ids.dtype is torch.uint16
    assert trace().expert_ids.dtype is torch.uint8


def test_an_id_is_checked_before_it_is_narrowed():
    with pytest.raises(RoutingTraceError, match="300"):
        RoutingTrace.of(
            torch.tensor([[[300, 1], [0, 1]]]),
            layers=LAYERS,
            experts=256,
            weight_version=0,
            origin="generated",
        )


def test_the_wrong_storage_dtype_raises():
    with pytest.raises(RoutingTraceError, match=r"torch\.int64.*stored as torch\.uint8"):
        dataclasses.replace(trace(), expert_ids=routes(4))
    with pytest.raises(RoutingTraceError, match=r"stored as torch\.uint8"):
        dataclasses.replace(trace(), expert_ids=routes(4).to(torch.uint16))


@pytest.mark.parametrize("experts", [8, 300])
def test_a_duplicate_expert_in_a_row_raises_and_is_located(experts):
    ids = trace(experts=experts).expert_ids.to(torch.int64)
    ids[2, 1] = torch.tensor([5, 5])
    with pytest.raises(RoutingTraceError, match=r"token 2, row 1 .*\[5, 5\] repeat"):
        dataclasses.replace(trace(experts=experts), expert_ids=ids.to(expert_dtype(experts)))


@pytest.mark.parametrize(("experts", "outside"), [(8, 8), (8, 255), (300, 300), (40000, 65535)])
def test_an_id_out_of_range_raises_and_is_located(experts, outside):
    ids = trace(experts=experts).expert_ids.to(torch.int64)
    ids[3, 0, 1] = outside
    with pytest.raises(RoutingTraceError, match=rf"token 3, row 0 .*{outside}.* {experts} experts"):
        dataclasses.replace(trace(experts=experts), expert_ids=ids.to(expert_dtype(experts)))


@pytest.mark.parametrize("experts", [256, 32768, 32769, 65536])
def test_the_first_and_the_last_expert_are_in_range(experts):
    ids = torch.tensor([[[0, experts - 1], [experts - 1, experts // 2]]])
    found = RoutingTrace.of(
        ids, layers=LAYERS, experts=experts, weight_version=0, origin="generated"
    )
    assert torch.equal(found.expert_ids.to(torch.int64), ids)


def test_a_negative_placeholder_is_refused_with_the_remedy():
    ids = routes(4)
    ids[3] = -1
    with pytest.raises(RoutingTraceError, match="mark tokens without a routing as invalid"):
        RoutingTrace.of(ids, layers=LAYERS, experts=8, weight_version=0, origin="generated")


def test_an_unwritten_zero_row_is_not_taken_for_expert_zero_k_times():
    ids = routes(4)
    ids[2] = 0
    with pytest.raises(RoutingTraceError, match=r"token 2.*never written; mark its token invalid"):
        RoutingTrace.of(ids, layers=LAYERS, experts=8, weight_version=0, origin="generated")
    valid = torch.tensor([True, True, False, True])
    assert not trace(4, valid=valid).valid[2]


def test_invalid_tokens_may_hold_anything():
    ids = routes(4)
    ids[1] = -1
    valid = torch.tensor([True, False, True, True])
    found = RoutingTrace.of(
        ids, layers=LAYERS, experts=8, weight_version=0, origin="generated", valid=valid
    )
    assert torch.equal(found.expert_ids[1], torch.zeros(2, 2, dtype=torch.uint8))


@pytest.mark.parametrize("layers", [(1,), (1, 3, 5)])
def test_a_wrong_layer_count_raises(layers):
    with pytest.raises(RoutingTraceError, match="layers"):
        dataclasses.replace(trace(), layers=layers)


def test_rows_in_layer_major_order_do_not_pass_for_token_major_ones():
    with pytest.raises(RoutingTraceError, match=r"\[tokens, moe_layers, topk\]"):
        RoutingTrace.of(
            routes(4).transpose(0, 1),
            layers=LAYERS,
            experts=8,
            weight_version=0,
            origin="generated",
        )


@pytest.mark.parametrize("layers", [(3, 1), (1, 1), (-1, 2), [1, 3], (1.0, 3)])
def test_layer_indices_must_increase(layers):
    with pytest.raises(RoutingTraceError, match="layers is"):
        dataclasses.replace(trace(), layers=layers)


@pytest.mark.parametrize(
    "valid", [torch.ones(3, dtype=torch.bool), torch.ones(4), torch.ones(4, 2, dtype=torch.bool)]
)
def test_valid_is_one_bool_per_token(valid):
    with pytest.raises(RoutingTraceError, match="valid"):
        dataclasses.replace(trace(), valid=valid)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((-1, 2, 0, "generated"), "start"),
        ((0, 2.0, 0, "generated"), "stop"),
        ((0, 2, -1, "generated"), "weight_version"),
        ((2, 2, 0, "generated"), "empty"),
        ((0, 2, 0, "sampled"), "origin"),
    ],
)
def test_a_segment_that_cannot_be_raises(fields, message):
    with pytest.raises(RoutingTraceError, match=message):
        Segment(*fields)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ((Segment(0, 3, 1, "prefilled"),), "token 3 is valid but in no segment"),
        ((Segment(0, 3, 1, "prefilled"), Segment(2, 4, 1, "generated")), "starts before token 3"),
        ((Segment(2, 4, 1, "prefilled"), Segment(0, 2, 1, "generated")), "starts before"),
        ((Segment(0, 5, 1, "prefilled"),), "too few rows"),
        ((), "token 0 is valid but in no segment"),
    ],
)
def test_segments_cover_every_valid_token_once(segments, message):
    with pytest.raises(RoutingTraceError, match=message):
        dataclasses.replace(trace(), segments=segments)


def test_concatenation_moves_segments_and_merges_what_continues():
    prompt = trace(3, version=1, origin="prefilled")
    first = trace(2, version=1, seed=1)
    second = trace(1, version=1, seed=2)
    swapped = trace(2, version=2, seed=3)
    whole = concatenate((prompt, first, second, swapped))
    assert whole.segments == (
        Segment(0, 3, 1, "prefilled"),
        Segment(3, 6, 1, "generated"),
        Segment(6, 8, 2, "generated"),
    )
    assert torch.equal(whole.slice(3, 5).expert_ids, first.expert_ids)
    assert whole.weight_versions() == (1, 2)
    assert whole.tokens_of("generated") == 5
    assert whole.tokens_of("re_prefilled") == 0


def test_traces_of_different_models_do_not_concatenate():
    with pytest.raises(RoutingTraceError, match="trace 1 has experts 16"):
        concatenate((trace(), trace(experts=16)))
    with pytest.raises(RoutingTraceError, match="layers"):
        concatenate((trace(), dataclasses.replace(trace(), layers=(0, 1))))
    with pytest.raises(RoutingTraceError, match="no traces"):
        concatenate(())


def test_padding_adds_invalid_tokens_and_never_removes_any():
    padded = trace(3).padded(5)
    assert padded.valid.tolist() == [True] * 3 + [False] * 2
    assert padded.segments == trace(3).segments
    with pytest.raises(RoutingTraceError, match="recorded twice"):
        trace(3).padded(2)


def test_slices_stay_inside():
    for bounds in ((-1, 2), (0, 5), (3, 2)):
        with pytest.raises(RoutingTraceError, match="slice"):
            trace().slice(*bounds)


def test_an_empty_trace_is_a_trace():
    empty = trace(0)
    assert (empty.tokens, empty.segments) == (0, ())
    assert concatenate((empty, trace())) == trace()
    assert RoutingTrace.from_bytes(empty.to_bytes()) == empty


def test_ids_that_are_no_integers_raise():
    with pytest.raises(InvalidInputError, match=r"torch\.float32"):
        RoutingTrace.of(
            torch.rand(1, 2, 2), layers=LAYERS, experts=8, weight_version=0, origin="generated"
        )


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 9), st.data())
def test_cutting_and_joining_is_the_identity(tokens, data):
    cut = data.draw(st.integers(0, tokens))
    whole = concatenate((trace(tokens, version=1), trace(3, version=2, seed=4)))
    assert concatenate((whole.slice(0, cut), whole.slice(cut, whole.tokens))) == whole


def calls_while(action):
    """Python and C calls that ``action`` makes."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    previous = sys.getprofile()
    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(previous)
    return calls


def test_validation_makes_as_many_calls_for_a_thousand_tokens_as_for_ten():
    trace(10)  # whatever happens once only
    assert calls_while(lambda: trace(10)) == calls_while(lambda: trace(1000))
