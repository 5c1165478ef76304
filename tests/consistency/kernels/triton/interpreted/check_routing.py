from __future__ import annotations

import pytest
import torch

from consistency.errors import InvalidInputError
from consistency.kernels import (
    grouped_linear,
    gumbel_noise,
    linear,
    moe_experts,
    route,
    sample,
    silu_and_mul,
    top_k,
)

NAN, INF = float("nan"), float("inf")


def test_of_equal_scores_the_lowest_index_comes_first():
    scores = torch.tensor([[1.0, 3.0, 3.0, -INF, 3.0], [-INF] * 5, [0.0, -0.0, INF, INF, 1.0]])
    values, ids = top_k(scores, 4)
    assert ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3], [2, 3, 4, 0]]
    assert torch.equal(values, scores.gather(1, ids))


def test_a_long_row_is_ordered_like_a_short_one():
    scores = torch.randint(0, 9, (2, 9000)).float()
    ids = top_k(scores, 70)[1]
    assert torch.equal(ids, torch.sort(scores, dim=1, descending=True, stable=True)[1][:, :70])
    assert torch.equal(
        top_k(scores[:, :300].contiguous(), 5)[1], top_k(scores[:, :300], 70)[1][:, :5]
    )


def test_a_nan_score_is_refused_by_row():
    with pytest.raises(InvalidInputError, match=r"scores\[1\] holds a NaN"):
        top_k(torch.tensor([[1.0, 2.0], [NAN, 0.0]]), 1)


@pytest.mark.parametrize("normalise", [False, True])
def test_routing_is_accurate_with_gradients_to_every_logit(error, normalise):
    logits, replay = torch.randn(4, 6), torch.tensor([[5, 0], [1, 2], [3, 4], [0, 1]])
    grad = torch.randn(4, 2)

    def exact(x):
        taken = x.softmax(1).gather(1, replay)
        return taken / taken.sum(1, keepdim=True) if normalise else taken

    ours = logits.clone().requires_grad_()
    weights, ids = route(ours, 2, normalise=normalise, replay_ids=replay)
    assert torch.equal(ids, replay)
    theirs = logits.double().requires_grad_()
    assert error(weights.detach(), exact(theirs).detach()) < 1e-6
    (found,) = torch.autograd.grad(weights, ours, grad)
    (wanted,) = torch.autograd.grad(exact(theirs), theirs, grad.double())
    assert error(found, wanted) < 2e-6
    assert torch.equal(route(logits, 2)[1], logits.topk(2)[1])


@pytest.mark.parametrize(
    ("ids", "message"), [([[0, 9]], "ids must be from 0 to 3"), ([[2, 2]], "appears twice")]
)
def test_impossible_replays_are_refused(ids, message):
    with pytest.raises(InvalidInputError, match=message):
        route(torch.zeros(1, 4), 2, replay_ids=torch.tensor(ids))
    with pytest.raises(InvalidInputError, match="softmax is undefined"):
        route(torch.tensor([[NAN, 0.0]]), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tokens_experts_are_combined_in_slot_order(wide, dtype):
    x, gate_up = wide(0, 6, 40, dtype=dtype), wide(1, 4, 24, 40, dtype=dtype) / 16
    down, weights = wide(2, 4, 40, 12, dtype=dtype) / 16, torch.rand(6, 2)
    ids = torch.tensor([[3, 0], [0, 3], [1, 0], [3, 1], [0, 1], [3, 0]])
    y = moe_experts(x, gate_up, down, weights, ids)
    for token in range(6):
        total = torch.zeros(40, dtype=torch.float64)
        for slot in range(2):
            expert = int(ids[token, slot])
            hidden = silu_and_mul(linear(x[token], gate_up[expert]))
            output = linear(hidden, down[expert], out_dtype=torch.float32)
            # One fused multiply-add: exact product and sum in fp64, then one rounding.
            total = (total + weights[token, slot].double() * output.double()).float().double()
        assert torch.equal(y[token], total.float().to(dtype))
    assert torch.equal(moe_experts(x[4:], gate_up, down, weights[4:], ids[4:]), y[4:])


def test_the_gradients_of_the_experts_are_accurate(error):
    x, gate_up, down = torch.randn(5, 20), torch.randn(3, 16, 20), torch.randn(3, 20, 8)
    weights, ids = torch.rand(5, 2), torch.tensor([[2, 0], [0, 2], [2, 0], [2, 0], [0, 2]])
    grad = torch.randn(5, 20)

    def exact(x, gate_up, down, weights):
        gate, up = torch.einsum("th,tsih->tsi", x, gate_up[ids]).chunk(2, -1)
        outputs = torch.einsum("tsi,tshi->tsh", torch.nn.functional.silu(gate) * up, down[ids])
        return (weights[..., None] * outputs).sum(1)

    leaves = [t.requires_grad_() for t in (x, gate_up, down, weights)]
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    ours = torch.autograd.grad(
        moe_experts(leaves[0], leaves[1], leaves[2], leaves[3], ids), leaves, grad
    )
    theirs = torch.autograd.grad(exact(*doubles), doubles, grad.double())
    for value, wanted in zip(ours, theirs, strict=True):
        assert error(value, wanted) < 2e-6


def test_an_expert_that_does_not_exist_is_refused():
    with pytest.raises(InvalidInputError, match="ids"):
        moe_experts(
            torch.zeros(1, 4),
            torch.zeros(2, 4, 4),
            torch.zeros(2, 4, 2),
            torch.ones(1, 1),
            torch.tensor([[2]]),
        )
    with pytest.raises(InvalidInputError, match="never fall"):
        grouped_linear(torch.zeros(2, 4), torch.zeros(2, 3, 4), torch.tensor([0, 3, 2]))


def test_a_token_maximises_logit_plus_the_documented_noise():
    logits = torch.randn(4, 2500)
    seeds, positions = torch.tensor([7, 7, -3, 2**40]), torch.tensor([0, 1, 5, 2**33])
    tokens = sample(logits, temperature=torch.full((4,), 0.8), seeds=seeds, positions=positions)
    for row in range(4):
        noise = gumbel_noise(int(seeds[row]), int(positions[row]), 2500)
        scores = (logits[row] - logits[row].max()) / 0.8 + noise
        assert tokens[row] == scores.argmax()


def test_a_rows_token_does_not_depend_on_its_slot():
    logits = torch.randn(5, 300)
    seeds, positions = torch.arange(5), torch.arange(5) + 10
    heat = torch.full((5,), 1.0)
    tokens = sample(logits, temperature=heat, seeds=seeds, positions=positions)
    order = [3, 1]
    part = sample(
        logits[order], temperature=heat[order], seeds=seeds[order], positions=positions[order]
    )
    assert torch.equal(part, tokens[order])


def test_temperature_zero_takes_the_first_maximum_and_infinities_are_honoured():
    logits = torch.tensor([[1.0, 5.0, 5.0, -INF], [0.0, -INF, INF, 1.0], [-INF, -INF, -9.0, -INF]])
    zeros = torch.zeros(3, dtype=torch.int64)
    heat = torch.tensor([0.0, 1.0, 1.0])
    assert sample(logits, temperature=heat, seeds=zeros, positions=zeros).tolist() == [1, 2, 2]


@pytest.mark.parametrize(
    ("row", "heat", "message"),
    [([NAN, 0.0], 1.0, "NaN"), ([-INF, -INF], 1.0, "masked"), ([0.0, 0.0], -1.0, "temperature")],
)
def test_rows_that_cannot_be_sampled_are_refused(row, heat, message):
    zero = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(InvalidInputError, match=message):
        sample(torch.tensor([row]), temperature=torch.tensor([heat]), seeds=zero, positions=zero)
