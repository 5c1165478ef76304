"""Submitting, finishing, interrupting, aborting and counting requests."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from consistency.contract import NumericsContract
from consistency.errors import UnsupportedError
from integrations.errors import CheckpointError, IntegrationError, RequestError
from integrations.trainer.engine import RolloutEngine
from integrations.trainer.model import Decoder, init_random
from integrations.trainer.trajectory import GenerationRequest


def request(request_id: str = "a", **changes) -> GenerationRequest:
    good = GenerationRequest(request_id, tuple(range(1, 11)), 6, 1.0, seed=5)
    return replace(good, **changes)


def drain(engine: RolloutEngine) -> dict:
    done = {}
    while engine.has_work:
        done |= {o.request_id: o.trajectory for o in engine.step() if o.trajectory is not None}
    return done


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": (1, 93)}, "prompt holds token id 93; the vocabulary is 0..92"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids holds token id -1"),
        ({"max_new_tokens": 248}, "10 prompt . 248 new tokens need 257 rows"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_at_once(dense_model, changes, message):
    engine = dense_model.engine()
    with pytest.raises(RequestError, match=message):
        engine.submit(request(**changes))
    assert not engine.has_work


def test_a_request_that_the_cache_can_never_hold_is_refused(dense_model):
    engine = dense_model.engine(blocks=3, block_size=4)
    engine.submit(request("fits", max_new_tokens=3))
    with pytest.raises(RequestError, match="the model and the cache allow 12"):
        engine.submit(request("does not", max_new_tokens=4))
    assert len(drain(engine)["fits"].versions) == 3


def test_a_request_id_may_be_used_again_only_after_the_first_has_finished(dense_model):
    engine = dense_model.engine()
    engine.submit(request())
    with pytest.raises(RequestError, match="already in this engine"):
        engine.submit(request())
    drain(engine)
    engine.submit(request())


@pytest.mark.parametrize("name", ["blocks", "block_size", "max_running", "prefill_chunk"])
def test_every_size_must_be_positive(dense_model, name):
    with pytest.raises(IntegrationError, match=f"{name} is 0"):
        dense_model.engine(**{name: 0})


def test_weights_that_do_not_fit_are_refused(dense_model):
    config, contract = dense_model.config, dense_model.contract
    weights = dict(dense_model.weights(0))
    weights.pop("model.norm.weight")
    with pytest.raises(CheckpointError, match=r"tensor model\.norm\.weight is missing"):
        RolloutEngine(config, contract, weights, 0, blocks=4)
    with pytest.raises(IntegrationError, match="the contract computes in float32"):
        RolloutEngine(
            config, NumericsContract(compute_dtype="float32"), dense_model.weights(0), 0, blocks=4
        )


@pytest.mark.parametrize(("field", "value"), [("attention_block", 128), ("kernels_revision", 99)])
def test_a_contract_that_the_kernels_cannot_keep_is_refused(dense_model, field, value):
    config, contract = dense_model.config, replace(dense_model.contract, **{field: value})
    with pytest.raises(UnsupportedError, match=f"{field} is {value}"):
        RolloutEngine(config, contract, dense_model.weights(0), 0, blocks=4)
    with pytest.raises(UnsupportedError, match=f"{field} is {value}"):
        Decoder(config, contract)


def test_generation_ends_after_a_stop_token_and_keeps_it(dense_model):
    free = dense_model.engine().generate([request(max_new_tokens=12)])[0]
    assert free.finish_reason == "length"
    stop = free.response_ids[4]
    first = free.response_ids.index(stop)
    stopped = dense_model.engine().generate([request(max_new_tokens=12, stop_token_ids=(stop,))])[0]
    assert stopped.finish_reason == "stop"
    assert stopped.response_ids == free.response_ids[: first + 1]


def test_the_trajectory_says_everything_about_its_request(model):
    asked = request("g/3", prompt_index=17, sample_index=3, temperature=0.5)
    trajectory = model.engine().generate([asked])[0]
    assert (trajectory.request_id, trajectory.prompt_index, trajectory.sample_index) == (
        "g/3",
        17,
        3,
    )
    assert trajectory.token_ids[:10] == asked.prompt
    assert trajectory.loss_mask == (0,) * 10 + (1,) * 6
    assert trajectory.versions == (0,) * 6
    assert trajectory.temperature == 0.5
    assert trajectory.contract_digest == model.contract.digest()
    assert [(s.start, s.stop, s.origin) for s in trajectory.segments] == [
        (0, 10, "prefilled"),
        (10, 15, "generated"),
    ]
    assert (trajectory.routing is not None) == bool(model.config.moe_layers)


def test_routing_is_returned_only_when_asked_for(moe_model):
    assert moe_model.engine().generate([request(record_routing=False)])[0].routing is None


def test_seeds_make_samples_differ_and_greedy_ignores_them(dense_model):
    engine = dense_model.engine()
    sampled = engine.generate([request(str(seed), seed=seed) for seed in range(8)])
    assert len({t.token_ids for t in sampled}) > 4
    greedy = engine.generate([request(str(s), seed=s, temperature=0.0) for s in range(8)])
    assert len({t.token_ids for t in greedy}) == 1


def test_a_group_prefills_its_shared_prompt_once(model):
    engine = model.engine(prefill_chunk=64)
    prompt = tuple(range(37))
    for index in range(8):
        engine.submit(request(str(index), prompt=prompt, seed=index))
    prefilled = cached = 0
    while engine.has_work:
        engine.step()
        prefilled += engine.metrics.prefill_tokens
        cached += engine.metrics.cache_hit_tokens
    assert cached == 7 * 36
    # The siblings compute the one row that gives their first token, which is no prefill.
    assert prefilled == 37


def test_siblings_do_not_wait_for_a_producer_that_has_stopped(dense_model):
    prompt = tuple(range(37))
    for stop in ("interrupt", "abort"):
        engine = dense_model.engine(prefill_chunk=8)
        for index in range(2):
            engine.submit(request(str(index), prompt=prompt))
        engine.step()
        assert engine.metrics.running == 1
        getattr(engine, stop)("0")
        assert len(drain(engine)["1"].versions) == 6


def test_every_token_is_reported_in_the_step_that_sampled_it(dense_model):
    engine = dense_model.engine(prefill_chunk=4)
    engine.submit(request())
    outputs = [engine.step() for _ in range(8)]
    assert [len(step) for step in outputs] == [0, 0, 1, 1, 1, 1, 1, 1]
    trajectory = outputs[-1][0].trajectory
    assert trajectory is not None
    assert tuple(step[0].token_id for step in outputs[2:]) == trajectory.response_ids
    assert tuple(step[0].logprob for step in outputs[2:]) == trajectory.logprobs
    assert all(step[0].trajectory is None for step in outputs[2:-1])


def test_metrics_count_the_step(dense_model):
    engine = dense_model.engine(prefill_chunk=25, max_running=2)
    for index in range(3):
        engine.submit(request(str(index), prompt=tuple(range(index, index + 10))))
    engine.interrupt("1")
    engine.step()
    metrics = engine.metrics
    assert (metrics.generated_tokens, metrics.prefill_tokens) == (2, 20)
    assert (metrics.running, metrics.waiting, metrics.paused) == (2, 0, 1)
    assert metrics.free_blocks == 200 - 2 * 3
    assert metrics.seconds > 0
    engine.step()
    assert (engine.metrics.generated_tokens, engine.metrics.prefill_tokens) == (2, 0)


def test_a_step_without_work_does_nothing(dense_model):
    engine = dense_model.engine()
    assert engine.step() == []
    assert engine.metrics.running == 0


def test_an_interrupted_request_keeps_its_kv_and_its_bits(model):
    expected = model.engine().generate([request(max_new_tokens=10)])[0]
    engine = model.engine()
    engine.submit(request(max_new_tokens=10))
    for _ in range(4):
        engine.step()
    engine.interrupt("a")
    assert not engine.has_work
    assert engine.step() == []
    engine.resume("a")
    engine.step()
    assert engine.metrics.prefill_tokens == 0
    trajectory = drain(engine)["a"]
    assert trajectory == expected


def test_an_interrupted_request_gives_up_its_kv_only_if_another_would_starve(dense_model):
    expected = dense_model.engine().generate([request(max_new_tokens=10)])[0]
    engine = dense_model.engine(blocks=6)
    engine.submit(request(max_new_tokens=10))
    for _ in range(4):
        engine.step()
    engine.interrupt("a")
    engine.submit(request("small", prompt=(1, 2), max_new_tokens=3))
    drain(engine)
    engine.submit(request("large", prompt=tuple(range(40, 56)), max_new_tokens=3))
    assert drain(engine).keys() == {"large"}
    engine.resume("a")
    trajectory = drain(engine)["a"]
    assert (trajectory.token_ids, trajectory.logprobs) == (expected.token_ids, expected.logprobs)
    # One of its blocks had not been needed and was found in the prefix cache.
    assert [(s.start, s.stop, s.origin) for s in trajectory.segments][2:4] == [
        (0, 4, "cached"),
        (4, 13, "re_prefilled"),
    ]


@pytest.mark.parametrize("call", ["interrupt", "resume", "abort"])
def test_an_unknown_request_is_named(dense_model, call):
    with pytest.raises(RequestError, match="'nobody' is not in this engine"):
        getattr(dense_model.engine(), call)("nobody")


def test_interrupting_twice_or_resuming_what_runs_is_refused(dense_model):
    engine = dense_model.engine()
    engine.submit(request())
    with pytest.raises(RequestError, match="is not interrupted"):
        engine.resume("a")
    engine.interrupt("a")
    with pytest.raises(RequestError, match="already interrupted"):
        engine.interrupt("a")


def test_an_aborted_request_returns_what_it_has(model):
    expected = model.engine().generate([request()])[0]
    engine = model.engine()
    engine.submit(request())
    for _ in range(3):
        engine.step()
    trajectory = engine.abort("a")
    assert trajectory.finish_reason == "aborted"
    assert trajectory.token_ids == expected.token_ids[:13]
    assert trajectory.logprobs == expected.logprobs[:3]
    assert engine.request_ids == ()
    engine.step()
    assert engine.metrics.free_blocks == 200


def test_an_abort_in_the_middle_of_prefill_marks_the_rows_that_were_not_computed(moe_model):
    engine = moe_model.engine(prefill_chunk=4)
    engine.submit(request())
    assert engine.abort("a").routing is None
    engine.submit(request())
    engine.step()
    trajectory = engine.abort("a")
    assert trajectory.logprobs == ()
    assert trajectory.routing is not None
    assert trajectory.routing.valid.tolist() == [True] * 4 + [False] * 5


def test_the_head_of_a_batch_does_not_wait_for_ever_behind_preemptions(dense_model):
    engine = dense_model.engine(blocks=14, max_running=8)
    for index in range(8):
        engine.submit(request(str(index), seed=index, max_new_tokens=30))
    finished = []
    for _ in range(2000):
        finished += [o.request_id for o in engine.step() if o.trajectory is not None]
        if not engine.has_work:
            break
    assert sorted(finished) == [str(index) for index in range(8)]
    assert finished[0] == "0"


def test_many_requests_and_long_ones_grow_the_tables(dense_model):
    engine = dense_model.engine(blocks=400, max_running=40)
    requests = [
        request(f"s{i}", seed=i, stop_token_ids=tuple(range(80, 80 + i % 4))) for i in range(40)
    ]
    requests.append(request("long", max_new_tokens=200))
    results = {t.request_id: t for t in engine.generate(requests)}
    for chosen in (requests[0], requests[39], requests[-1]):
        expected = dense_model.engine().generate([chosen])[0]
        assert results[chosen.request_id].token_ids == expected.token_ids


def test_float32_weights_run_under_a_float32_contract(dense_model):
    contract = NumericsContract(compute_dtype="float32")
    weights = init_random(dense_model.config, 0, torch.float32)
    engine = RolloutEngine(dense_model.config, contract, weights, 0, blocks=50)
    assert len(engine.generate([request()])[0].versions) == 6
