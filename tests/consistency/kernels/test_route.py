from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.kernels import route, softmax, top_k


def replayed(seed, tokens, experts, k):
    noise = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed))
    return noise.argsort(dim=1)[:, :k]


def exact_weights(logits, ids, normalise):
    weights = logits.softmax(-1).gather(1, ids)
    return weights / weights.sum(-1, keepdim=True) if normalise else weights


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 30),
    st.integers(1, 140),
    st.booleans(),
    st.booleans(),
    st.integers(0, 10**6),
    st.data(),
)
def test_a_tokens_experts_weights_and_gradient_do_not_depend_on_its_batch(
    tokens, experts, normalise, replay, seed, data
):
    k = data.draw(st.integers(1, min(experts, 10)))
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, experts, generator=generator) * 4
    grad = torch.randn(tokens, k, generator=generator)
    ids = replayed(seed, tokens, experts, k) if replay else None

    def run(rows):
        part = logits[rows].requires_grad_()
        weights, chosen = route(
            part, k, normalise=normalise, replay_ids=None if ids is None else ids[rows]
        )
        return weights.detach(), chosen, torch.autograd.grad(weights, part, grad[rows])[0]

    whole = run(list(range(tokens)))
    picked = data.draw(st.lists(st.integers(0, tokens - 1), max_size=40))
    for a, b in zip(run(picked), whole, strict=True):
        assert torch.equal(a, b[picked])


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("replay", [True, False])
def test_gradients_reach_the_logits_and_are_exact(error, normalise, replay):
    logits = torch.randn(50, 32, generator=torch.Generator().manual_seed(0)) * 2
    ids = replayed(1, 50, 32, 4) if replay else None
    ours, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    weights, chosen = route(ours, 4, normalise=normalise, replay_ids=ids)
    want = exact_weights(exact, chosen, normalise)
    grad = torch.randn(50, 4, generator=torch.Generator().manual_seed(2))
    (got_grad,) = torch.autograd.grad(weights, ours, grad)
    (want_grad,) = torch.autograd.grad(want, exact, grad.double())
    assert error(weights.detach(), want.detach()) < 2e-7
    assert error(got_grad, want_grad) < 4e-7
    assert (got_grad != 0).any(dim=1).all()


def test_unnormalised_replay_moves_experts_that_were_not_replayed():
    logits = torch.zeros(1, 6, requires_grad=True)
    weights, _ = route(logits, 2, normalise=False, replay_ids=torch.tensor([[5, 0]]))
    (grad,) = torch.autograd.grad(weights.sum(), logits)
    assert (grad[0, 1:5] < 0).all()
    assert (grad[0, [0, 5]] > 0).all()


def test_replaying_the_live_ids_gives_the_same_weights_and_gradient():
    logits = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    live = logits.clone().requires_grad_()
    weights, ids = route(live, 8)
    again = logits.clone().requires_grad_()
    for dtype in (torch.uint8, torch.uint16, torch.int32, torch.int64):
        weights_again, ids_again = route(again, 8, replay_ids=ids.to(dtype))
        assert torch.equal(weights, weights_again)
        assert torch.equal(ids, ids_again)
    grads = [
        torch.autograd.grad(w.square().sum(), x)[0]
        for w, x in ((weights, live), (weights_again, again))
    ]
    assert torch.equal(*grads)


def test_it_is_softmax_then_top_k():
    logits = torch.randn(30, 128, generator=torch.Generator().manual_seed(0))
    values, ids = top_k(softmax(logits), 8)
    weights, chosen = route(logits, 8, normalise=False)
    assert torch.equal(weights, values)
    assert torch.equal(chosen, ids)


def test_tied_experts_are_chosen_by_the_lowest_id_in_every_run(threads):
    logits = torch.zeros(300, 256)
    for count in (1, 2, 2):
        with threads(count):
            assert torch.equal(route(logits, 8)[1], torch.arange(8).expand(300, 8))


def test_strided_logits_give_the_same_bits(wide):
    logits = wide(0, 20, 32)[:, ::2]
    expected = route(logits.clone(), 3)
    for got in (route(logits, 3), route(logits.t().contiguous().t(), 3)):
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])


def test_the_callers_replayed_ids_are_not_changed():
    ids = torch.tensor([[2, 0]])
    weights, chosen = route(torch.zeros(1, 3, requires_grad=True), 2, replay_ids=ids)
    chosen.fill_(1)
    assert ids.tolist() == [[2, 0]]
    assert weights.requires_grad


def test_the_forward_is_the_same_with_and_without_gradients(wide):
    logits = wide(0, 40, 60)
    assert torch.equal(route(logits, 4)[0], route(logits.clone().requires_grad_(), 4)[0].detach())


def test_empty_inputs_work():
    weights, ids = route(torch.empty(0, 8, requires_grad=True), 2)
    assert weights.shape == ids.shape == (0, 2)
    weights.sum().backward()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[0, 1], [3, 3]], r"replay_ids\[1\] is \[3, 3\]: an expert appears twice"),
        ([[0, 4], [0, 1]], r"replay_ids\[0\] is \[0, 4\]; ids must be from 0 to 3"),
        ([[0, 1], [-1, 1]], r"replay_ids\[1\] is \[-1, 1\]; ids must be from 0 to 3"),
        ([[0, 1]], "replay_ids must have shape"),
        ([[0], [1]], "replay_ids must have shape"),
    ],
)
@pytest.mark.parametrize("with_gradient", [True, False])
def test_replaying_impossible_ids_raises(ids, message, with_gradient):
    logits = torch.zeros(2, 4, requires_grad=with_gradient)
    with pytest.raises(InvalidInputError, match=message):
        route(logits, 2, replay_ids=torch.tensor(ids))


def test_replayed_experts_without_any_probability_cannot_be_normalised():
    logits = torch.tensor([[0.0, 0.0, -500.0, -500.0]])
    with pytest.raises(InvalidInputError, match=r"\[2, 3\].*probability 0"):
        route(logits, 2, replay_ids=torch.tensor([[2, 3]]))
    weights, _ = route(logits, 2, normalise=False, replay_ids=torch.tensor([[2, 3]]))
    assert torch.equal(weights, torch.zeros(1, 2))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("ids", [None, torch.tensor([[0, 1]] * 2)])
def test_undefined_logits_raise(value, ids):
    logits = torch.zeros(2, 4)
    logits[1, 2] = value
    with pytest.raises(InvalidInputError, match=r"router_logits\[1\] holds a NaN or \+inf"):
        route(logits, 2, replay_ids=ids)


def test_bad_arguments_are_named():
    with pytest.raises(InvalidInputError, match="k must be from 1 to the 4 experts, got 5"):
        route(torch.zeros(2, 4), 5)
    with pytest.raises(UnsupportedError, match=r"router_logits must be float32 \(the gate"):
        route(torch.zeros(2, 4, dtype=torch.bfloat16), 1)
    with pytest.raises(UnsupportedError, match=r"replay_ids must be integers, got torch.float32"):
        route(torch.zeros(2, 4), 1, replay_ids=torch.zeros(2, 1))
