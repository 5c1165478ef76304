"""Real vLLM against transformers: no token's log-probability differs by one bit."""

from __future__ import annotations

import pytest

from bench.divergence.capture import locate
from bench.divergence.measure import measure
from bench.divergence.rollout import Job
from bench.divergence.scenarios import SCENARIOS, Workload
from integrations.trainer.model.config import ModelConfig
from integrations.vllm.options import OPERATIONS

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]


def job(
    folder, operations, scenarios=tuple(SCENARIOS), requests: int = 16, answer: int = 64
) -> Job:
    vocabulary = ModelConfig.load(folder).vocab_size
    workload = Workload.random(
        vocabulary, requests=requests, shortest=40, longest=72, answer=answer, seed=0
    )
    return Job(
        str(folder),
        list(scenarios),
        operations,
        [list(prompt) for prompt in workload.prompts],
        workload.answer,
        workload.seed,
    )


@pytest.mark.parametrize("name", ["dense", "moe", "llama"])
def test_every_scenario_is_exactly_equal(checkpoint, name):
    rows = measure(
        "vllm",
        "transformers",
        job(checkpoint(name), list(OPERATIONS)),
        list(OPERATIONS),
        lambda _: None,
    )
    assert [item.row.scenario for item in rows] == list(SCENARIOS)
    for item in rows:
        assert item.row.tokens >= 1000
        assert item.row.exact_fraction == 1.0, item.row
        assert (item.row.k3_kl, item.row.max_abs_diff, item.row.router_flip_rate) == (0, 0, 0)


def test_the_embedded_learner_agrees_with_vllm_too(checkpoint):
    (item,) = measure(
        "vllm",
        "embedded",
        job(checkpoint("moe"), list(OPERATIONS), ["all together"]),
        None,
        lambda _: None,
    )
    assert item.row.exact_fraction == 1.0 and item.row.router_flip_rate == 0


def test_the_stock_engines_drift(checkpoint):
    (item,) = measure(
        "vllm", "transformers", job(checkpoint("moe"), None, ["batch 16"]), None, lambda _: None
    )
    assert item.row.exact_fraction < 0.1
    assert item.row.router_flip_rate > 0


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name != "sampling"])
def test_without_one_operation_the_difference_is_located(checkpoint, operation):
    name = "dense" if operation == "silu_and_mul" else "moe"
    kept = [other for other in OPERATIONS if other != operation]
    found = locate(job(checkpoint(name), kept, ["solo"], answer=24), list(OPERATIONS))
    assert found is not None
    assert found.operation == operation, str(found)


def test_with_every_operation_there_is_nothing_to_locate(checkpoint):
    whole = list(OPERATIONS)
    assert locate(job(checkpoint("moe"), whole, ["solo"], answer=24), whole) is None
