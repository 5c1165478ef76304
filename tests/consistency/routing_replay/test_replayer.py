import dataclasses

import pytest
import torch

from consistency.errors import RoutingReplayError, RoutingTraceError
from consistency.routing_replay import RoutingReplayer, RoutingTrace

LAYERS = (1, 3)


def routes(tokens, seed=0, experts=8):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, 2, experts, generator=generator).topk(2, dim=-1).indices


def trace(tokens=4, seed=0, valid=None, experts=8):
    return RoutingTrace.of(
        routes(tokens, seed, experts),
        layers=LAYERS,
        experts=experts,
        weight_version=0,
        origin="generated",
        valid=valid,
    )


def replayer(source, **options):
    return RoutingReplayer(
        source.expert_ids, source.valid, source.layers, source.experts, **options
    )


@pytest.mark.parametrize("experts", [8, 300])
def test_every_layer_gets_its_traced_ids(experts):
    replaying = replayer(trace(experts=experts))
    for row, layer in enumerate(LAYERS):
        found = replaying.ids_for(layer)
        assert found.dtype is torch.int64
        assert torch.equal(found, routes(4, experts=experts)[:, row])
    replaying.finish()
    assert replaying.live_tokens == 0


def test_the_live_choice_does_not_move_a_traced_token():
    live = routes(4, seed=9)[:, 0]
    assert torch.equal(replayer(trace()).ids_for(1, live), routes(4)[:, 0])


def test_invalid_tokens_take_the_live_router_and_are_counted():
    valid = torch.tensor([True, False, True, False])
    replaying = replayer(trace(valid=valid))
    live = routes(4, seed=9)
    for row, layer in enumerate(LAYERS):
        expected = torch.where(valid[:, None], routes(4)[:, row], live[:, row])
        assert torch.equal(replaying.ids_for(layer, live[:, row]), expected)
    replaying.finish()
    assert replaying.live_tokens == 2


def test_an_invalid_token_without_a_live_choice_raises():
    replaying = replayer(trace(valid=torch.tensor([True, True, True, False])))
    with pytest.raises(RoutingReplayError, match="1 tokens have no traced routing"):
        replaying.ids_for(1)


def test_a_layer_that_was_not_consumed_raises():
    replaying = replayer(trace())
    replaying.ids_for(1)
    with pytest.raises(RoutingReplayError, match=r"layers \[3\] were not replayed"):
        replaying.finish()


def test_entries_cannot_be_replayed_again_in_the_next_step():
    replaying = replayer(trace())
    replaying.ids_for(1)
    with pytest.raises(RoutingReplayError, match="layer 1 was replayed 1 times already"):
        replaying.ids_for(1)


def test_activation_recompute_sees_the_ids_of_the_forward_pass():
    # Between the passes a near-tie may flip; the shapes that the first pass saved must still fit.
    valid = torch.tensor([True, True, True, False])
    replaying = replayer(trace(valid=valid), passes=2)
    forward, flipped = routes(4, seed=1), routes(4, seed=2)
    for row, layer in enumerate(LAYERS):
        first = replaying.ids_for(layer, forward[:, row])
        with pytest.raises(RoutingReplayError, match="not replayed 2 times"):
            replaying.finish()
        assert torch.equal(replaying.ids_for(layer, flipped[:, row]), first)
    replaying.finish()


def test_a_layer_that_is_not_in_the_trace_raises():
    with pytest.raises(RoutingReplayError, match="layer 2 has no traced routing"):
        replayer(trace()).ids_for(2)


@pytest.mark.parametrize("tokens", [3, 5])
def test_too_few_or_too_many_tokens_raise(tokens):
    with pytest.raises(RoutingReplayError, match="exactly these tokens"):
        replayer(trace(4)).ids_for(1, routes(tokens)[:, 0])


def test_a_wrong_topk_raises():
    with pytest.raises(RoutingReplayError, match="topk"):
        replayer(trace()).ids_for(1, routes(4)[:, 0, :1])


def test_replaying_a_duplicate_expert_id_raises():
    ids = trace().expert_ids.clone()
    ids[1, 0] = 6
    with pytest.raises(RoutingTraceError, match=r"token 1.*repeat"):
        RoutingReplayer(ids, torch.ones(4, dtype=torch.bool), LAYERS, 8)


def test_replaying_an_id_out_of_range_raises():
    ids = trace().expert_ids.clone()
    ids[1, 0, 0] = 8
    with pytest.raises(RoutingTraceError, match="token 1"):
        RoutingReplayer(ids, torch.ones(4, dtype=torch.bool), LAYERS, 8)


def test_replaying_a_wrong_layer_count_raises():
    with pytest.raises(RoutingTraceError, match="layers"):
        RoutingReplayer(trace().expert_ids, trace().valid, (1, 3, 5), 8)


def test_wide_ids_are_refused_rather_than_held_in_memory():
    with pytest.raises(RoutingTraceError, match="stored as"):
        RoutingReplayer(routes(4), trace().valid, LAYERS, 8)


def test_a_packed_batch_replays_its_sequences_in_order():
    first, second = trace(3, seed=1), trace(2, seed=2).padded(3)
    replaying = RoutingReplayer.of((first, second), (3, 3))
    live = routes(6, seed=5)[:, 0]
    found = replaying.ids_for(1, live)
    expected = torch.cat([routes(3, seed=1)[:, 0], routes(2, seed=2)[:, 0], live[5:]])
    assert torch.equal(found, expected)
    assert (replaying.tokens, replaying.live_tokens) == (6, 1)


@pytest.mark.parametrize(("counts", "message"), [((4, 3), "too few"), ((2, 3), "too many")])
def test_a_sequence_with_another_number_of_tokens_raises(counts, message):
    with pytest.raises(RoutingTraceError, match=f"trace 0 has {message} tokens"):
        RoutingReplayer.of((trace(3), trace(3)), counts)


def test_a_batch_with_a_missing_trace_raises():
    with pytest.raises(RoutingTraceError, match="1 traces for 2 sequences"):
        RoutingReplayer.of((trace(3),), (3, 3))


def test_traces_of_two_models_do_not_make_one_batch():
    other = dataclasses.replace(trace(3), layers=(0, 1))
    with pytest.raises(RoutingTraceError, match="one model"):
        RoutingReplayer.of((trace(3), other), (3, 3))


@pytest.mark.parametrize("passes", [0, -1, True])
def test_a_number_of_passes_that_cannot_be_raises(passes):
    with pytest.raises(RoutingReplayError, match="passes"):
        replayer(trace(), passes=passes)
