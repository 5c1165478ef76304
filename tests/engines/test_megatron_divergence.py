"""Real vLLM and the embedded engine against real Megatron-Core: no log-probability differs."""

from __future__ import annotations

import pytest
import torch

from bench.divergence.capture import capture, compare, locate
from bench.divergence.measure import measure
from bench.divergence.rollout import Job, run_vllm
from bench.divergence.sample import Answer
from bench.divergence.scenarios import SCENARIOS, Workload
from bench.divergence.train import Scores, score
from consistency import mismatch_metrics
from consistency.routing_replay import router_flip_rate
from integrations.trainer.model.config import ModelConfig
from integrations.vllm.options import OPERATIONS

# Whose removal from Megatron-Core shows in its own output. The rotation has no module there, and
# torch's RMSNorm happens to round these rows as the contract does.
SHOWN = ("linear", "silu_and_mul", "attention", "router", "experts", "lm_head")

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]


def job(folder, operations, scenarios, *, answer: int = 64, tp_invariant: bool = False) -> Job:
    vocabulary = ModelConfig.load(folder).vocab_size
    workload = Workload.random(
        vocabulary, requests=16, shortest=40, longest=72, answer=answer, seed=0
    )
    return Job(
        str(folder),
        list(scenarios),
        operations,
        [list(prompt) for prompt in workload.prompts],
        workload.answer,
        workload.seed,
        tp_invariant,
    )


def exact(rows) -> None:
    for item in rows:
        assert item.row.tokens >= 1000
        assert item.row.exact_fraction == 1.0, item.row
        assert (item.row.k3_kl, item.row.max_abs_diff, item.row.router_flip_rate) == (0, 0, 0)


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_vllm_and_megatron_core_are_exactly_equal_in_every_scenario(checkpoint, name):
    work = job(checkpoint(name), list(OPERATIONS), SCENARIOS)
    rows = measure("vllm", "megatron", work, list(OPERATIONS), lambda _: None)
    assert [item.row.scenario for item in rows] == list(SCENARIOS)
    exact(rows)


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_the_embedded_engine_and_megatron_core_are_exactly_equal(checkpoint, name):
    work = job(checkpoint(name), list(OPERATIONS), SCENARIOS)
    rows = measure("embedded", "megatron", work, list(OPERATIONS), lambda _: None)
    exact(rows)


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_one_rank_of_vllm_and_two_of_megatron_core_are_exactly_equal(checkpoint, name):
    folder = checkpoint(f"{name} for two ranks")
    work = job(folder, list(OPERATIONS), ["all together"], tp_invariant=True)
    exact(measure("vllm", "megatron", work, list(OPERATIONS), lambda _: None, train_ranks=2))


def compared(answers: list[Answer], scores: Scores) -> tuple[float, float]:
    """k3 KL, and the share of router decisions that differ."""
    rollout = torch.cat([torch.tensor(answer.logprobs) for answer in answers])
    k3 = mismatch_metrics(torch.cat(scores.logprobs), rollout).k3_kl
    traces = [trace for answer in answers if (trace := answer.trace) is not None]
    flips = router_flip_rate(
        torch.cat([trace.expert_ids.to(torch.int64) for trace in traces]), torch.cat(scores.routes)
    )
    return k3, flips


def test_replay_takes_the_flips_from_stock_engines_and_lowers_their_drift(checkpoint):
    folder = checkpoint("moe")
    answers = run_vllm(job(folder, None, ["batch 16"]))["batch 16"]
    live_k3, live_flips = compared(answers, score("megatron", str(folder), answers, None))
    k3, flips = compared(answers, score("megatron", str(folder), answers, None, replay=True))
    assert live_flips > 0 and flips == 0
    assert 0 < k3 < live_k3
    print(f"k3 {live_k3:.3g} -> {k3:.3g}, flips {live_flips:.3g} -> {flips}")


@pytest.fixture(scope="module")
def captured(checkpoint):
    """Every layer's outputs of vLLM in lockstep, by model."""
    return {
        name: capture(job(checkpoint(name), list(OPERATIONS), ["solo"], answer=24))
        for name in ("dense", "moe")
    }


@pytest.mark.parametrize("operation", SHOWN)
def test_without_one_operation_of_megatron_core_the_difference_is_located(
    checkpoint, captured, operation
):
    name = "dense" if operation == "silu_and_mul" else "moe"
    kept = [other for other in OPERATIONS if other != operation]
    found = compare(str(checkpoint(name)), captured[name], kept, "megatron")
    assert found is not None
    assert found.operation == operation, str(found)


def test_without_the_rotation_of_megatron_core_the_attention_differs(checkpoint, captured):
    kept = [other for other in OPERATIONS if other != "rotary"]
    found = compare(str(checkpoint("moe")), captured["moe"], kept, "megatron")
    assert found is not None
    assert (found.operation, found.layer) == ("attention", 0)  # a rotation has no module


@pytest.mark.parametrize("operation", ["router", "rms_norm"])
def test_without_one_operation_of_vllm_the_difference_is_located(checkpoint, operation):
    kept = [other for other in OPERATIONS if other != operation]
    work = job(checkpoint("moe"), kept, ["solo"], answer=24)
    found = locate(work, list(OPERATIONS), "megatron")
    assert found is not None
    assert found.operation == operation, str(found)


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_with_every_operation_there_is_nothing_to_locate(checkpoint, captured, name):
    whole = list(OPERATIONS)
    assert compare(str(checkpoint(name)), captured[name], whole, "megatron") is None
