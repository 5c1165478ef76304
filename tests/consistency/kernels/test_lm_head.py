from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.kernels import (
    library,
    linear,
    lm_head,
    lm_head_logits,
    lm_head_logprob,
    token_logprob,
)

BFLOAT = torch.bfloat16
DTYPES = st.sampled_from([torch.float32, BFLOAT, torch.float16])
INFINITY = float("inf")


def targets_for(seed: int, rows: int, vocabulary: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (rows,), generator=generator)


def exact(logits, targets, temperature):
    log_p = torch.log_softmax(logits.double() / temperature, -1)
    entropy = -(log_p.exp() * log_p.clamp_min(-1e30)).sum(-1)
    return log_p.gather(1, targets[:, None])[:, 0], entropy


def fused(hidden, weight, targets, grads, temperature):
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    results = lm_head_logprob(hidden, weight, targets, temperature=temperature)
    gradients = torch.autograd.grad(results, (hidden, weight), grads)
    return *(result.detach() for result in results), *gradients


def unfused(hidden, weight, targets, grads, temperature):
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    logits = lm_head_logits(hidden, weight)
    results = token_logprob(logits, targets, temperature=temperature)
    gradients = torch.autograd.grad(results, (hidden, weight), grads)
    return *(result.detach() for result in results), *gradients


def all_equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(0, 24),
    vocabulary=st.one_of(st.integers(1, 90), st.sampled_from([128, 1024, 1025, 2048, 2500])),
    width=st.integers(1, 40),
    dtype=DTYPES,
    temperature=st.sampled_from([1.0, 0.6, 1.7]),
    tile=st.sampled_from([1 << 23, 700]),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_the_fused_form_has_the_bits_of_the_plain_one_for_any_batch_and_tile(
    wide, rows, vocabulary, width, dtype, temperature, tile, seed, data
):
    hidden, weight = (
        wide(seed, rows, width, dtype=dtype),
        wide(seed + 1, vocabulary, width, dtype=dtype),
    )
    targets = targets_for(seed, rows, vocabulary)
    grads = (wide(seed + 2, rows), wide(seed + 3, rows))
    plain = unfused(hidden, weight, targets, grads, temperature)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm_head, "_TILE_ELEMENTS", tile)
        assert all_equal(fused(hidden, weight, targets, grads, temperature), plain)
    picked = data.draw(st.lists(st.integers(0, rows - 1), max_size=30)) if rows else []
    part = fused(hidden[picked], weight, targets[picked], [g[picked] for g in grads], temperature)
    assert all_equal(part[:3], [result[picked] for result in plain[:3]])


def test_decode_equals_scoring_on_a_real_vocabulary(wide, threads):
    hidden, weight = wide(0, 16, 576, dtype=BFLOAT), wide(1, 49152, 576, dtype=BFLOAT) / 64
    targets = targets_for(0, 16, 49152)
    whole = lm_head_logprob(hidden, weight, targets, temperature=0.7)
    for start, stop in ((3, 4), (0, 2), (5, 14)):
        with threads(1):
            logits = lm_head_logits(hidden[start:stop], weight)
            part = token_logprob(logits, targets[start:stop], temperature=0.7)
        assert all_equal(part, [result[start:stop] for result in whole])


@pytest.mark.parametrize("vocabulary", [7, 1000, 49152, 50257])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_logprob_and_entropy_are_near_those_of_float64(vocabulary, temperature):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(12, vocabulary, generator=generator) * torch.linspace(0.1, 15, 12)[:, None]
    targets = torch.cat([logits[:6].argmax(-1), targets_for(1, 6, vocabulary)])
    logprob, entropy = token_logprob(logits, targets, temperature=temperature)
    # The division by the temperature rounds the logits themselves; exact() starts from that.
    exact_logprob, exact_entropy = exact((logits / temperature), targets, 1.0)
    assert (logprob - exact_logprob).abs().max() < 2e-6 + 6e-8 * exact_logprob.abs().max()
    assert (entropy - exact_entropy).abs().max() < 5e-6
    torchs = torch.log_softmax(logits / temperature, -1).gather(1, targets[:, None])[:, 0]
    ours, theirs = (logprob - exact_logprob).abs().max(), (torchs - exact_logprob).abs().max()
    assert ours <= theirs * 1.5 + 1e-7


@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 12), st.integers(2, 300), st.integers(1, 30), DTYPES, st.sampled_from([1.0, 0.5])
)
def test_gradients_are_those_of_float64(error, rows, vocabulary, width, dtype, temperature):
    generator = torch.Generator().manual_seed(rows * 1009 + vocabulary * 31 + width)
    hidden = torch.randn(rows, width, generator=generator).to(dtype)
    weight = (torch.randn(vocabulary, width, generator=generator) / math.sqrt(width)).to(dtype)
    grads = (torch.randn(rows, generator=generator), torch.randn(rows, generator=generator))
    targets = targets_for(0, rows, vocabulary)
    _, _, *got = fused(hidden, weight, targets, grads, temperature)
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    expected = torch.autograd.grad(
        exact(hidden @ weight.t(), targets, temperature),
        (hidden, weight),
        [g.double() for g in grads],
    )
    # Half a unit in the last place of the dtype, and a few of fp32 for the sums before it.
    bound = torch.finfo(dtype).eps / 2 + 1e-5
    for value, reference in zip(got, expected, strict=True):
        assert value.dtype == dtype
        assert error(value, reference) <= bound


def test_only_one_of_the_two_results_may_be_used(wide):
    hidden, weight = wide(0, 5, 8), wide(1, 30, 8)
    targets, ones, zeros = targets_for(0, 5, 30), torch.ones(5), torch.zeros(5)
    for index, grads in ((0, (ones, zeros)), (1, (zeros, ones))):
        leaf = hidden.clone().requires_grad_()
        result = lm_head_logprob(leaf, weight, targets, temperature=1.0)[index]
        (grad,) = torch.autograd.grad(result.sum(), leaf)
        assert torch.equal(grad, fused(hidden, weight, targets, grads, 1.0)[2])


def test_a_logit_of_minus_infinity_has_no_probability_and_no_entropy():
    logits = torch.tensor(
        [[0.0, -INFINITY, 0.0, -INFINITY], [-INFINITY, 3.0, -INFINITY, -INFINITY]]
    )
    logits.requires_grad_()
    logprob, entropy = token_logprob(logits, torch.tensor([2, 1]), temperature=1.0)
    assert torch.equal(logprob, torch.tensor([math.log(0.5), 0.0]))
    assert torch.equal(entropy, torch.tensor([math.log(2.0), 0.0]))
    (grad,) = torch.autograd.grad(logprob.sum() + entropy.sum(), logits)
    assert torch.equal(grad, torch.tensor([[-0.5, 0, 0.5, 0], [0, 0, 0, 0]]))
    masked, _ = token_logprob(logits.detach(), torch.tensor([1, 0]), temperature=1.0)
    assert torch.equal(masked, torch.tensor([-INFINITY, -INFINITY]))


def test_rows_without_a_softmax_are_nan_and_leave_the_others_alone(wide):
    logits, targets = wide(0, 6, 70), targets_for(0, 6, 70)
    expected = token_logprob(logits, targets, temperature=0.9)
    dirty = logits.clone()
    dirty[0], dirty[2, 69], dirty[4, 3] = -INFINITY, float("nan"), INFINITY
    results = token_logprob(dirty, targets, temperature=0.9)
    for got, want in zip(results, expected, strict=True):
        assert got[[0, 2, 4]].isnan().all()
        assert torch.equal(got[[1, 3, 5]], want[[1, 3, 5]])


def test_a_token_without_gradient_adds_nothing_whatever_its_logits():
    logits = torch.tensor([[float("nan"), 1.0], [0.0, 1.0]], requires_grad=True)
    logprob, _ = token_logprob(logits, torch.tensor([0, 1]), temperature=1.0)
    (grad,) = torch.autograd.grad(logprob[1], logits)
    assert torch.equal(grad[0], torch.zeros(2))
    assert grad[1].isfinite().all()


def test_main_grad_is_accumulated_in_one_addition(wide):
    hidden, weight = wide(0, 9, 20, dtype=BFLOAT), wide(1, 130, 20, dtype=BFLOAT)
    targets, grads = targets_for(0, 9, 130), (wide(2, 9), wide(3, 9))
    single = weight.float().requires_grad_()  # the same values, with a gradient that is not rounded
    results = lm_head_logprob(hidden, single, targets, temperature=0.8)
    (product,) = torch.autograd.grad(results, (single,), grads)
    weight = weight.requires_grad_()
    before = wide(4, 130, 20)
    weight.main_grad = before.clone()
    results = lm_head_logprob(hidden, weight, targets, temperature=0.8)
    torch.autograd.backward(results, grads)
    assert weight.grad is None
    assert torch.equal(weight.main_grad, before + product)


def test_the_forward_is_the_same_with_and_without_gradients(wide):
    hidden, weight, targets = wide(0, 7, 20), wide(1, 300, 20), targets_for(0, 7, 300)
    grads = (torch.ones(7), torch.ones(7))
    with_gradient = fused(hidden, weight, targets, grads, 1.3)[:2]
    assert all_equal(lm_head_logprob(hidden, weight, targets, temperature=1.3), with_gradient)
    assert torch.equal(lm_head_logits(hidden, weight), linear(hidden, weight))


def test_strided_operands_threads_and_instruction_sets_change_no_bit(wide, threads, monkeypatch):
    logits, targets = wide(0, 40, 3000), targets_for(0, 40, 3000)
    expected = token_logprob(logits, targets, temperature=0.7)
    assert all_equal(token_logprob(logits.t().contiguous().t(), targets, temperature=0.7), expected)
    assert all_equal(
        token_logprob(wide(0, 40, 3000).repeat(1, 2)[:, :3000], targets, temperature=0.7), expected
    )
    repeated = targets.repeat_interleave(2)[::2]
    for count in (1, 2):
        with threads(count):
            assert all_equal(token_logprob(logits, repeated, temperature=0.7), expected)
    grads = (wide(1, 40), wide(2, 40))

    def gradient():
        leaf = logits.clone().requires_grad_()
        return torch.autograd.grad(token_logprob(leaf, targets, temperature=0.7), leaf, grads)

    reference = gradient()
    for variant in library.runnable_variants():
        with monkeypatch.context() as patch:
            for name in ("_token_logprob", "_token_logprob_gradient"):
                patch.setattr(lm_head, name, getattr(lm_head, name).on(variant))
            assert all_equal(token_logprob(logits, targets, temperature=0.7), expected)
            assert all_equal(gradient(), reference)


def test_the_fused_form_works_for_no_tokens():
    hidden = torch.zeros(0, 4, requires_grad=True)
    weight = torch.zeros(10, 4, requires_grad=True)
    logprob, entropy = lm_head_logprob(
        hidden, weight, torch.zeros(0, dtype=torch.int64), temperature=1.0
    )
    assert logprob.shape == entropy.shape == (0,)
    (grad,) = torch.autograd.grad(logprob.sum() + entropy.sum(), weight)
    assert torch.equal(grad, torch.zeros(10, 4))


def test_bad_arguments_are_refused():
    hidden, weight, targets = torch.zeros(3, 4), torch.zeros(10, 4), torch.tensor([0, 9, 1])
    logits = torch.zeros(3, 10)
    for temperature in (0.0, -1.0, INFINITY, float("nan")):
        with pytest.raises(InvalidInputError, match="temperature must be finite"):
            lm_head_logprob(hidden, weight, targets, temperature=temperature)
    for bad, message in (
        (torch.tensor([0, 10, 1]), r"targets must lie in \[0, 10\)"),
        (torch.tensor([0, -1, 1]), r"targets must lie in \[0, 10\)"),
        (torch.tensor([0, 1]), r"targets must have shape \(3,\)"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            lm_head_logprob(hidden, weight, bad, temperature=1.0)
        with pytest.raises(InvalidInputError, match=message):
            token_logprob(logits, bad, temperature=1.0)
    with pytest.raises(UnsupportedError, match="targets must be int64"):
        token_logprob(logits, targets.int(), temperature=1.0)
    with pytest.raises(UnsupportedError, match="logits must be float32"):
        token_logprob(logits.bfloat16(), targets, temperature=1.0)
    with pytest.raises(InvalidInputError, match="same second dimension"):
        lm_head_logits(hidden, torch.zeros(10, 5))
    with pytest.raises(UnsupportedError, match="hidden has dtype"):
        lm_head_logits(hidden.double(), weight)
