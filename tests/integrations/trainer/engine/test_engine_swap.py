"""New weights in a running engine: who uses them from when, and what the trajectory says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from integrations.errors import CheckpointError, IntegrationError, SwapError
from integrations.trainer.engine import RolloutEngine
from integrations.trainer.trajectory import GenerationRequest, Trajectory


def request(request_id: str = "a", **changes) -> GenerationRequest:
    return replace(GenerationRequest(request_id, tuple(range(1, 11)), 8, 1.0, seed=5), **changes)


def finish(engine: RolloutEngine, request_id: str = "a") -> Trajectory:
    while True:
        for output in engine.step():
            if output.trajectory is not None and output.request_id == request_id:
                return output.trajectory


def swapped_after(model, steps: int, policy: str, **options) -> Trajectory:
    engine = model.engine(**options)
    engine.submit(request())
    for _ in range(steps):
        engine.step()
    engine.swap(model.weights(1), 1, policy)
    return finish(engine)


def log(trajectory: Trajectory) -> list[tuple[int, int, int, str]]:
    return [(s.start, s.stop, s.weight_version, s.origin) for s in trajectory.segments]


def test_continue_with_kv_goes_on_over_the_rows_it_has(model):
    trajectory = swapped_after(model, 3, "continue_with_kv")
    assert trajectory.versions == (0, 0, 0, 1, 1, 1, 1, 1)
    assert log(trajectory) == [
        (0, 10, 0, "prefilled"),
        (10, 12, 0, "generated"),
        (12, 17, 1, "generated"),
    ]
    if trajectory.routing is not None:
        assert trajectory.routing.segments == trajectory.segments


def test_continue_with_kv_is_the_default(model):
    engine = model.engine()
    engine.submit(request())
    engine.step()
    engine.swap(model.weights(1), 1)
    assert finish(engine) == swapped_after(model, 1, "continue_with_kv")


def test_re_prefill_builds_every_row_again(model):
    trajectory = swapped_after(model, 3, "re_prefill")
    assert trajectory.versions == (0, 0, 0, 1, 1, 1, 1, 1)
    assert log(trajectory) == [
        (0, 10, 0, "prefilled"),
        (10, 12, 0, "generated"),
        (0, 12, 1, "re_prefilled"),
        (12, 17, 1, "generated"),
    ]


def test_after_a_re_prefill_old_logprobs_keep_the_routes_they_were_sampled_with(moe_model):
    old = moe_model.engine().generate([request()])[0]
    trajectory = swapped_after(moe_model, 3, "re_prefill")
    assert trajectory.routing is not None
    assert old.routing is not None
    assert torch.equal(trajectory.routing.expert_ids[:12], old.routing.expert_ids[:12])
    assert [(s.start, s.stop, s.weight_version, s.origin) for s in trajectory.routing.segments] == [
        (0, 12, 0, "re_prefilled"),
        (12, 17, 1, "generated"),
    ]


def test_after_a_re_prefill_the_rest_is_what_the_new_weights_alone_would_sample(model):
    trajectory = swapped_after(model, 3, "re_prefill")
    rest = replace(request(), prompt=trajectory.token_ids[:13], max_new_tokens=5)
    engine = RolloutEngine(model.config, model.contract, model.weights(1), 1, blocks=50)
    alone = engine.generate([rest])[0]
    assert alone.response_ids == trajectory.token_ids[13:]
    assert alone.logprobs == trajectory.logprobs[3:]


def test_finish_on_old_lets_running_requests_end_on_their_weights(model):
    old = model.engine().generate([request()])[0]
    engine = model.engine()
    engine.submit(request())
    engine.step()
    engine.swap(model.weights(1), 1, "finish_on_old")
    engine.submit(request("b"))
    assert engine.versions_in_use == (0, 1)
    versions = {(o.request_id, o.weight_version) for o in engine.step()}
    assert versions == {("a", 0), ("b", 1)}
    assert finish(engine) == old
    assert engine.versions_in_use == (1,)
    assert finish(engine, "b").versions == (1,) * 8


def test_a_waiting_request_starts_on_the_new_weights_under_every_policy(model):
    for policy in ("continue_with_kv", "re_prefill", "finish_on_old"):
        trajectory = swapped_after(model, 0, policy)
        assert trajectory.versions == (1,) * 8
        assert log(trajectory)[0] == (0, 10, 1, "prefilled")


def test_a_request_preempted_under_finish_on_old_stays_on_its_weights(model):
    engine = model.engine(blocks=10, max_running=3)
    for index in range(3):
        engine.submit(request(str(index), prompt=tuple(range(index, index + 10))))
    engine.step()
    engine.step()
    engine.swap(model.weights(1), 1, "finish_on_old")
    preemptions, results = 0, {}
    while engine.has_work:
        for output in engine.step():
            if output.trajectory is not None:
                results[output.request_id] = output.trajectory
        preemptions += engine.metrics.preemptions
    assert preemptions > 0
    assert all(set(t.versions) in ({0}, {1}) for t in results.values())
    assert results["0"].versions == (0,) * 8


def test_no_new_request_shares_a_prefix_built_by_older_weights(model):
    engine = model.engine()
    engine.generate([request()])
    engine.swap(model.weights(1), 1)
    engine.submit(request())
    engine.step()
    assert engine.metrics.cache_hit_tokens == 0
    expected = RolloutEngine(model.config, model.contract, model.weights(1), 1, blocks=50)
    assert finish(engine).logprobs == expected.generate([request()])[0].logprobs


def test_rows_built_by_two_versions_are_never_shared(model):
    engine = model.engine()
    engine.submit(request())
    engine.step()
    engine.swap(model.weights(1), 1)
    mixed = finish(engine)
    engine.submit(request("b", prompt=mixed.token_ids, max_new_tokens=2))
    engine.step()
    assert engine.metrics.cache_hit_tokens == 0


def test_rolling_back_to_an_earlier_version_shares_nothing_either(model):
    engine = model.engine()
    engine.generate([request()])
    engine.swap(model.weights(1), 1)
    # The number 0 again, but other weights: only the number of the swap tells them apart.
    engine.swap(model.weights(2), 0)
    engine.submit(request())
    engine.step()
    assert engine.metrics.cache_hit_tokens == 0
    assert finish(engine).versions == (0,) * 8


@pytest.mark.parametrize("policy", ["continue_with_kv", "re_prefill"])
def test_an_interrupted_request_is_swapped_as_well(model, policy):
    engine = model.engine()
    engine.submit(request())
    for _ in range(3):
        engine.step()
    engine.interrupt("a")
    engine.swap(model.weights(1), 1, policy)
    assert not engine.has_work
    engine.resume("a")
    assert finish(engine) == swapped_after(model, 3, policy)


def test_a_swap_in_the_middle_of_prefill_is_logged_row_by_row(model):
    trajectory = swapped_after(model, 2, "continue_with_kv", prefill_chunk=4)
    assert trajectory.versions == (1,) * 8
    assert log(trajectory)[:2] == [(0, 8, 0, "prefilled"), (8, 10, 1, "prefilled")]


@pytest.mark.parametrize(
    ("version", "policy", "message"),
    [
        (0, "continue_with_kv", "version 0 cannot follow version 0"),
        (-1, "continue_with_kv", "version -1"),
        (1, "now", "policy 'now' is unknown"),
    ],
)
def test_an_impossible_swap_is_refused(dense_model, version, policy, message):
    engine = dense_model.engine()
    with pytest.raises(SwapError, match=message):
        engine.swap(dense_model.weights(1), version, policy)
    assert engine.version == 0


def test_weights_that_do_not_fit_leave_the_old_ones_in_use(dense_model):
    engine = dense_model.engine()
    weights = dict(dense_model.weights(1))
    weights["model.norm.weight"] = torch.ones(3, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \(3,\)"):
        engine.swap(weights, 1)
    wide = {name: tensor.float() for name, tensor in dense_model.weights(1).items()}
    with pytest.raises(SwapError, match=r"are torch\.float32"):
        engine.swap(wide, 1)
    assert engine.version == 0
    assert engine.generate([request()])[0].versions == (0,) * 8


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_stop_the_step_and_can_be_rolled_back(model, value):
    engine = model.engine()
    engine.submit(request())
    engine.step()
    broken = {name: tensor.clone() for name, tensor in model.weights(1).items()}
    broken["model.norm.weight"][3] = value
    engine.swap(broken, 1)
    for _ in range(2):
        with pytest.raises(IntegrationError, match=r"weight version 1 .*'a'"):
            engine.step()
    engine.swap(model.weights(0), 0, "re_prefill")
    expected = model.engine().generate([request()])[0]
    trajectory = finish(engine)
    assert trajectory.token_ids == expected.token_ids
    assert trajectory.logprobs == expected.logprobs


def test_a_swap_copies_no_weights(dense_model):
    engine = dense_model.engine()
    weights = {name: tensor.clone() for name, tensor in dense_model.weights(1).items()}
    engine.swap(weights, 1)
    before = engine.generate([request()])[0]
    weights["model.embed_tokens.weight"].copy_(dense_model.weights(2)["model.embed_tokens.weight"])
    assert engine.generate([request("b", prompt=(50, 51))])[0].token_ids != before.token_ids
    assert engine._weights.tensors["model.norm.weight"] is weights["model.norm.weight"]
