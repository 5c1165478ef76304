"""What a request samples depends on nothing but itself, the weights and the contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from consistency import kernels
from consistency.contract import NumericsContract
from consistency.routing_replay import RoutingRecorder
from integrations.trainer.engine import RolloutEngine
from integrations.trainer.model import (
    Decoder,
    ModelConfig,
    VarlenAttention,
    init_random,
    lm_head_weight,
)
from integrations.trainer.trajectory import GenerationRequest, Trajectory

RunAtRandom = Callable[..., dict[str, Trajectory]]


def assert_same(trajectory: Trajectory, reference: Trajectory) -> None:
    assert trajectory.token_ids == reference.token_ids
    assert torch.equal(torch.tensor(trajectory.logprobs), torch.tensor(reference.logprobs))
    assert trajectory.finish_reason == reference.finish_reason
    if reference.routing is not None:
        assert trajectory.routing is not None
        assert bool(trajectory.routing.valid.all())
        assert torch.equal(trajectory.routing.expert_ids, reference.routing.expert_ids)


@pytest.fixture(scope="module")
def requests(model: Any) -> list[GenerationRequest]:
    return model.requests(16)


@pytest.fixture(scope="module")
def reference(model: Any, requests: list[GenerationRequest]) -> dict[str, Trajectory]:
    return model.alone(requests)


def test_a_batch_of_sixteen_gives_the_tokens_of_a_batch_of_one(model, requests, reference):
    for trajectory in model.engine().generate(requests):
        assert_same(trajectory, reference[trajectory.request_id])


def test_the_order_of_arrival_changes_nothing(model, requests, reference):
    for trajectory in model.engine(max_running=5).generate(requests[::-1]):
        assert_same(trajectory, reference[trajectory.request_id])


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_the_prefill_chunk_changes_nothing(model, requests, reference, chunk):
    for trajectory in model.engine(prefill_chunk=chunk).generate(requests):
        assert_same(trajectory, reference[trajectory.request_id])


@pytest.mark.parametrize("block_size", [1, 16])
def test_the_block_size_changes_nothing(model, requests, reference, block_size):
    for trajectory in model.engine(block_size=block_size, blocks=800).generate(requests):
        assert_same(trajectory, reference[trajectory.request_id])


def test_prefix_hits_change_nothing(model, requests, reference):
    engine = model.engine()
    engine.generate(requests)
    again = [replace(request, request_id=request.request_id + "'") for request in requests]
    for request in again:
        engine.submit(request)
    hits = 0
    while engine.request_ids:
        for output in engine.step():
            if output.trajectory is not None:
                assert_same(output.trajectory, reference[output.request_id.removesuffix("'")])
        hits += engine.metrics.cache_hit_tokens
    assert hits > 150


def test_preemption_changes_nothing(model, requests, reference):
    engine = model.engine(blocks=18, max_running=8)
    for request in requests:
        engine.submit(request)
    preemptions = 0
    while engine.request_ids:
        for output in engine.step():
            if output.trajectory is not None:
                assert_same(output.trajectory, reference[output.request_id])
        preemptions += engine.metrics.preemptions
    assert preemptions > 0


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 2**32),
    chunk=st.integers(1, 60),
    blocks=st.integers(17, 80),
    max_running=st.integers(1, 16),
)
def test_no_schedule_changes_a_bit(
    model: Any,
    requests: list[GenerationRequest],
    reference: dict[str, Trajectory],
    run_at_random: RunAtRandom,
    seed: int,
    chunk: int,
    blocks: int,
    max_running: int,
):
    engine = model.engine(prefill_chunk=chunk, blocks=blocks, max_running=max_running)
    results = run_at_random(model, engine, requests, Random(seed))
    assert results.keys() == reference.keys()
    for request_id, trajectory in results.items():
        assert_same(trajectory, reference[request_id])
    assert engine.metrics.free_blocks == blocks


def learner_logprobs(
    config: ModelConfig, contract: NumericsContract, weights: Any, trajectories: list[Trajectory]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One packed pass with gradients, as the learner makes it; temperature 1."""
    rows = [len(t.token_ids) - 1 for t in trajectories]
    tokens = torch.tensor([i for t in trajectories for i in t.token_ids[:-1]])
    targets = torch.tensor([i for t in trajectories for i in t.token_ids[1:]])
    positions = torch.cat([torch.arange(n) for n in rows])
    starts = torch.tensor([0, *rows]).cumsum(0).to(torch.int32)
    recorder = None
    if config.moe_layers:
        recorder = RoutingRecorder(config.moe_layers, config.experts, config.experts_per_token)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    hidden = Decoder(config, contract).forward(
        leaves, tokens, positions, VarlenAttention(starts), recorder
    )
    logprob, _ = kernels.lm_head_logprob(hidden, lm_head_weight(leaves), targets, temperature=1.0)
    logprob.sum().backward()
    assert all(leaf.grad is not None for leaf in leaves.values())
    response = torch.cat(
        [torch.arange(n) >= t.prompt_length - 1 for n, t in zip(rows, trajectories, strict=True)]
    )
    return logprob.detach()[response], None if recorder is None else recorder.take()


def test_the_learners_pass_with_gradients_gives_the_engines_logprobs_and_routes(model):
    requests = [replace(r, temperature=1.0) for r in model.requests(8, seed=1)]
    trajectories = model.engine(prefill_chunk=9).generate(requests)
    logprobs, routes = learner_logprobs(
        model.config, model.contract, model.weights(0), trajectories
    )
    assert torch.equal(logprobs, torch.tensor([x for t in trajectories for x in t.logprobs]))
    if routes is not None:
        assert torch.equal(routes, torch.cat([t.routing.expert_ids for t in trajectories]))


def test_a_mid_size_model_keeps_its_bits_at_any_batch():
    config = ModelConfig(
        model_type="llama",
        hidden_size=576,
        layers=2,
        heads=9,
        kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        vocab_size=49152,
        max_positions=512,
        initializer_range=0.08,
        tie_word_embeddings=True,
    )
    contract, weights, rng = NumericsContract(), init_random(config, 0), Random(0)
    trunk = tuple(rng.randrange(49152) for _ in range(70))
    requests = [
        GenerationRequest(f"r{i}", (*trunk[: 1 + i * 5], i), 6, 1.0, seed=i) for i in range(14)
    ]

    def run(chosen: list[GenerationRequest], chunk: int) -> list[Trajectory]:
        engine = RolloutEngine(
            config, contract, weights, 0, blocks=60, max_running=16, prefill_chunk=chunk
        )
        return engine.generate(chosen)

    batched = run(requests, 48)
    for index in (0, 5, 13):
        assert_same(run([requests[index]], 512)[0], batched[index])
    logprobs, _ = learner_logprobs(config, contract, weights, batched)
    assert torch.equal(logprobs, torch.tensor([x for t in batched for x in t.logprobs]))
