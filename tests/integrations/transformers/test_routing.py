"""Routers of a transformers model, recorded and replayed."""

from __future__ import annotations

import pytest
import torch

from consistency.errors import RoutingReplayError, UnsupportedError
from consistency.routing_replay import RoutingRecorder, RoutingReplayer, RoutingTrace
from integrations.transformers import patch, record_routes, replay_routes

from .conftest import make_model

MOE_LAYER = 1


def tokens() -> torch.Tensor:
    return torch.randint(0, 128, (2, 24), generator=torch.Generator().manual_seed(2))


def recorded(model) -> RoutingTrace:
    recorder = RoutingRecorder((MOE_LAYER,), 8, 2)
    with record_routes(model, recorder), torch.no_grad():
        model(input_ids=tokens(), use_cache=False)
    return RoutingTrace.of(
        recorder.take(), layers=(MOE_LAYER,), experts=8, weight_version=0, origin="prefilled"
    )


@pytest.fixture(params=[False, True], ids=["stock", "patched"])
def moe(request):
    model = make_model("qwen3_moe")
    if request.param:
        patch(model)
    return model


def test_a_replayed_pass_takes_the_recorded_experts(moe):
    trace = recorded(moe)
    other = make_model("qwen3_moe")
    with torch.no_grad():
        other.model.layers[MOE_LAYER].mlp.gate.weight.neg_()
    assert recorded(other) != trace
    replayer = RoutingReplayer.of([trace], [48])
    seen = RoutingRecorder((MOE_LAYER,), 8, 2)
    with replay_routes(other, replayer), record_routes(other, seen), torch.no_grad():
        other(input_ids=tokens(), use_cache=False)
    assert torch.equal(seen.take(), trace.expert_ids)


def test_replaying_the_own_routes_changes_no_bit_of_a_patched_model():
    model = make_model("qwen3_moe")
    patch(model)
    trace = recorded(model)
    with torch.no_grad():
        live = model(input_ids=tokens(), use_cache=False).logits
        with replay_routes(model, RoutingReplayer.of([trace], [48])):
            replayed = model(input_ids=tokens(), use_cache=False).logits
    assert torch.equal(live, replayed)


def test_gradients_reach_the_router_through_replayed_ids(moe):
    with replay_routes(moe, RoutingReplayer.of([recorded(moe)], [48])):
        moe(input_ids=tokens(), use_cache=False).logits.float().logsumexp(-1).sum().backward()
    gradient = moe.model.layers[MOE_LAYER].mlp.gate.weight.grad
    assert gradient is not None and gradient.abs().sum() > 0


def test_a_trace_of_other_tokens_is_refused(moe):
    replayer = RoutingReplayer.of([recorded(moe).slice(0, 40)], [40])
    with pytest.raises(RoutingReplayError, match="replay the trace of exactly these tokens"):
        with replay_routes(moe, replayer):
            moe(input_ids=tokens(), use_cache=False)


def test_a_dense_model_has_no_routers():
    with pytest.raises(UnsupportedError, match="without routers"):
        with record_routes(make_model("qwen3"), RoutingRecorder((), 1, 1)):
            pass
