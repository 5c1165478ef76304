"""Replaying a build log gives the engine's logprobs back, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from consistency.contract import NumericsContract
from consistency.routing_replay import RoutingTrace
from integrations.errors import TrajectoryError
from integrations.trainer.model import Decoder
from integrations.trainer.scoring import score_trajectories, score_trajectory
from integrations.trainer.trajectory import GenerationRequest, Trajectory

SWAPS = 12


def assert_no_drift(decoder, weights, trajectories, **options) -> int:
    tokens = 0
    scores = score_trajectories(decoder, weights, trajectories, **options)
    for trajectory, score in zip(trajectories, scores, strict=True):
        assert score.request_id == trajectory.request_id
        assert bool(score.scored.all())
        assert torch.equal(score.logprobs, torch.tensor(trajectory.logprobs, dtype=torch.float32))
        assert score.flips == 0
        if trajectory.routing is not None:
            rows = int(trajectory.routing.valid.sum())
            assert score.compared == rows * len(trajectory.routing.layers)
        tokens += len(trajectory.logprobs)
    return tokens


def test_trajectories_of_one_version_are_scored_without_drift(model):
    trajectories = model.engine().generate(model.requests(16, seed=3))
    assert assert_no_drift(model.decoder(), {0: model.weights(0)}, trajectories) > 50


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 2**32),
    chunk=st.integers(1, 60),
    blocks=st.integers(17, 100),
    max_tokens=st.integers(16, 600),
)
def test_swaps_interruptions_preemptions_prefix_hits_and_chunks_leave_no_drift(
    model, run_at_random, seed, chunk, blocks, max_tokens
):
    rng = Random(seed)
    engine = model.engine(prefill_chunk=chunk, blocks=blocks, max_running=8)
    results = run_at_random(model, engine, model.requests(14, seed), rng, swaps=SWAPS, aborts=True)
    weights = model.versions(SWAPS + 1)
    assert_no_drift(model.decoder(), weights, list(results.values()), max_tokens=max_tokens)


def test_the_random_schedules_contain_every_kind_of_event(moe_model, run_at_random):
    origins, versions, preemptions = set(), set(), 0
    for seed in range(4):
        engine = moe_model.engine(prefill_chunk=13, blocks=24, max_running=8)
        step = engine.step

        def counted(step=step, engine=engine):
            nonlocal preemptions
            outputs = step()
            preemptions += engine.metrics.preemptions
            return outputs

        engine.step = counted
        results = run_at_random(
            moe_model, engine, moe_model.requests(14, seed), Random(seed), swaps=SWAPS, aborts=True
        )
        for trajectory in results.values():
            origins |= {segment.origin for segment in trajectory.segments}
            versions.add(len(set(trajectory.versions)))
    assert origins == {"prefilled", "generated", "cached", "re_prefilled"}
    assert max(versions) >= 3
    assert preemptions > 0


def swapped_twice(model, policy: str) -> Trajectory:
    engine = model.engine()
    engine.submit(GenerationRequest("a", tuple(range(1, 11)), 9, 1.0, seed=2))
    outputs = []
    for step in range(9):
        if step in (3, 6):
            engine.swap(model.weights(step // 3), step // 3, policy)
        outputs += engine.step()
    trajectory = outputs[-1].trajectory
    assert trajectory.versions == (0, 0, 0, 1, 1, 1, 2, 2, 2)
    return trajectory


@pytest.mark.parametrize(
    ("policy", "missing", "scored"),
    [
        # With the KV kept, a token depends on every version before it.
        ("continue_with_kv", 2, [True] * 6 + [False] * 3),
        ("continue_with_kv", 1, [True] * 3 + [False] * 6),
        ("continue_with_kv", 0, [False] * 9),
        # Built again, it depends on its own version alone.
        ("re_prefill", 2, [True] * 6 + [False] * 3),
        ("re_prefill", 1, [True] * 3 + [False] * 3 + [True] * 3),
        ("re_prefill", 0, [False] * 3 + [True] * 6),
    ],
)
def test_tokens_that_depend_on_a_missing_version_are_not_scored(model, policy, missing, scored):
    trajectory = swapped_twice(model, policy)
    weights = model.versions(3)
    del weights[missing]
    score = score_trajectory(model.decoder(), weights, trajectory)
    assert score.scored.tolist() == scored
    expected = torch.tensor(trajectory.logprobs, dtype=torch.float32)
    assert torch.equal(score.logprobs[score.scored], expected[score.scored])
    assert not score.logprobs[~score.scored].any()
    assert score.flips == 0


def test_without_any_version_nothing_is_scored(model):
    score = score_trajectory(model.decoder(), {}, swapped_twice(model, "re_prefill"))
    assert not score.scored.any()
    assert score.compared == 0


def test_scoring_under_other_weights_shows_up_as_drift_and_flips(moe_model):
    trajectory = moe_model.engine().generate([GenerationRequest("a", (1, 2), 20, 1.0, seed=0)])[0]
    score = score_trajectory(moe_model.decoder(), {0: moe_model.weights(1)}, trajectory)
    assert (score.logprobs - torch.tensor(trajectory.logprobs)).abs().max() > 0.1
    assert 0 < score.flips <= score.compared == 21 * 2


def test_a_changed_route_is_counted_once_per_layer(moe_model):
    trajectory = moe_model.engine().generate([GenerationRequest("a", (1, 2), 5, 1.0, seed=0)])[0]
    trace = trajectory.routing
    ids = trace.expert_ids.clone()
    ids[2, 1] = (ids[2, 1] + 1) % 8
    # The order of the slots sends no token elsewhere.
    ids[0, 0] = ids[0, 0].flip(0)
    changed = RoutingTrace(ids, trace.layers, trace.experts, trace.valid, trace.segments)
    score = score_trajectory(
        moe_model.decoder(), {0: moe_model.weights(0)}, replace(trajectory, routing=changed)
    )
    assert score.flips == 1


def test_trajectories_that_cannot_be_replayed_are_refused(dense_model):
    trajectory = dense_model.engine().generate([GenerationRequest("a", (1, 2), 5, 1.0, seed=0)])[0]
    weights = {0: dense_model.weights(0)}
    other = Decoder(dense_model.config, NumericsContract(tp_invariant=True))
    with pytest.raises(TrajectoryError, match="was sampled under contract"):
        score_trajectory(other, weights, trajectory)
    with pytest.raises(TrajectoryError, match="has no segments"):
        score_trajectory(dense_model.decoder(), weights, replace(trajectory, segments=()))
    short = Decoder(dense_model.config, dense_model.contract, max_positions=4)
    with pytest.raises(TrajectoryError, match="has 7 tokens, the model 4 positions"):
        score_trajectory(short, weights, trajectory)
    foreign = replace(trajectory, token_ids=(*trajectory.token_ids[:-1], 93))
    with pytest.raises(TrajectoryError, match="outside the vocabulary of 93"):
        score_trajectory(dense_model.decoder(), weights, foreign)


def test_no_trajectories_give_no_scores(dense_model):
    assert score_trajectories(dense_model.decoder(), {}, []) == []


def test_trajectories_cut_short_before_any_token_have_nothing_to_score(dense_model):
    engine = dense_model.engine(prefill_chunk=4)
    engine.submit(GenerationRequest("a", tuple(range(10)), 5, 1.0, seed=0))
    engine.step()
    started = engine.abort("a")
    engine.submit(GenerationRequest("b", (1,), 5, 1.0, seed=0))
    waiting = engine.abort("b")
    scores = score_trajectories(
        dense_model.decoder(), {0: dense_model.weights(0)}, [started, waiting]
    )
    assert [len(score.logprobs) for score in scores] == [0, 0]
