import pytest
import torch

from consistency.errors import InvalidInputError, RoutingReplayError, RoutingTraceError
from consistency.routing_replay import RoutingRecorder


def ids(tokens=3, seed=0, experts=8):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=generator).topk(2, dim=-1).indices


@pytest.mark.parametrize(("experts", "dtype"), [(8, torch.uint8), (300, torch.uint16)])
def test_a_pass_is_taken_as_tokens_by_layers_in_the_smallest_dtype(experts, dtype):
    recorder = RoutingRecorder((1, 3), experts, 2)
    recorder.record(3, ids(seed=3, experts=experts))
    recorder.record(1, ids(seed=1, experts=experts))
    found = recorder.take()
    assert (tuple(found.shape), found.dtype) == ((3, 2, 2), dtype)
    assert torch.equal(found[:, 0].to(torch.int64), ids(seed=1, experts=experts))
    assert torch.equal(found[:, 1].to(torch.int64), ids(seed=3, experts=experts))


def test_take_starts_a_new_pass():
    recorder = RoutingRecorder((1,), 8, 2)
    for tokens in (4, 1):
        recorder.record(1, ids(tokens))
        assert recorder.take().shape == (tokens, 1, 2)


def test_stale_entries_of_a_pass_that_was_not_taken_raise_in_the_next():
    recorder = RoutingRecorder((1, 3), 8, 2)
    recorder.record(1, ids())
    with pytest.raises(RoutingReplayError, match="layer 1 was recorded already"):
        recorder.record(1, ids())
    recorder.discard()
    recorder.record(1, ids())


def test_a_layer_that_did_not_record_is_named():
    recorder = RoutingRecorder((1, 3), 8, 2)
    recorder.record(3, ids())
    with pytest.raises(RoutingReplayError, match=r"layers \[1\] did not record"):
        recorder.take()


def test_a_dense_layer_has_nothing_to_record():
    with pytest.raises(RoutingReplayError, match="layer 0 is not an MoE layer"):
        RoutingRecorder((1, 3), 8, 2).record(0, ids())


def test_layers_must_see_the_same_tokens():
    recorder = RoutingRecorder((1, 3), 8, 2)
    recorder.record(1, ids(3))
    with pytest.raises(RoutingReplayError, match="layer 3 recorded 2 tokens, layer 1 3"):
        recorder.record(3, ids(2))


@pytest.mark.parametrize("shape", [(3,), (3, 3), (3, 1, 2)])
def test_a_wrong_topk_raises(shape):
    with pytest.raises(RoutingReplayError, match="topk 2"):
        RoutingRecorder((1,), 8, 2).record(1, torch.zeros(shape, dtype=torch.int64))


def test_scores_are_not_taken_for_ids():
    with pytest.raises(InvalidInputError, match=r"torch\.float32"):
        RoutingRecorder((1,), 8, 2).record(1, torch.rand(3, 2))


def test_an_id_out_of_range_raises_instead_of_wrapping():
    recorder = RoutingRecorder((1,), 256, 2)
    recorder.record(1, torch.tensor([[256, 1]]))
    with pytest.raises(RoutingTraceError, match="256"):
        recorder.take()


def test_the_record_is_a_copy():
    recorder = RoutingRecorder((1,), 8, 2)
    buffer = ids().to(torch.int32)
    recorder.record(1, buffer)
    buffer.zero_()
    assert torch.equal(recorder.take()[:, 0].to(torch.int64), ids())


def test_a_pass_without_tokens_records_no_rows():
    recorder = RoutingRecorder((1,), 8, 2)
    recorder.record(1, ids(0))
    assert recorder.take().shape == (0, 1, 2)


@pytest.mark.parametrize(
    "arguments", [((3, 1), 8, 2), ((1,), 0, 1), ((1,), 8, 9), ((1,), 8, 0), ((1,), 70000, 2)]
)
def test_a_recorder_of_an_impossible_model_raises(arguments):
    with pytest.raises(RoutingTraceError):
        RoutingRecorder(*arguments)
