from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.kernels import add_rms_norm, rms_norm

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
EPS = 1e-5


def run(x, weight, grad=None, zero_centered=False):
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = rms_norm(x, weight, EPS, zero_centered=zero_centered)
    grads = torch.autograd.grad(y, (x, weight), torch.ones_like(y) if grad is None else grad)
    return y.detach(), *grads


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 700), DTYPES, st.integers(0, 10**6), st.data())
def test_a_rows_result_and_gradient_do_not_depend_on_its_batch(
    wide, rows, width, dtype, seed, data
):
    x, grad = wide(seed, rows, width, dtype=dtype), wide(seed + 1, rows, width, dtype=dtype)
    weight = wide(seed + 2, width, dtype=dtype)
    y, grad_x, _ = run(x, weight, grad)
    picked = data.draw(st.lists(st.integers(0, rows - 1), max_size=50))
    y_part, grad_part, _ = run(x[picked], weight, grad[picked])
    assert torch.equal(y_part, y[picked])
    assert torch.equal(grad_part, grad_x[picked])


def test_a_row_is_the_same_on_both_sides_of_256_tokens(wide):
    weight = wide(0, 576)
    x = wide(1, 300, 576)
    whole = rms_norm(x, weight, EPS)
    for rows in (1, 255, 256, 257):
        assert torch.equal(rms_norm(x[:rows], weight, EPS), whole[:rows])


def test_strided_expanded_and_transposed_inputs_give_the_same_bits(wide):
    weight = wide(0, 66)[::2]
    x = wide(1, 12, 66)[:, ::2]
    expected = rms_norm(x.clone(), weight.clone(), EPS)
    assert torch.equal(rms_norm(x, weight, EPS), expected)
    assert torch.equal(rms_norm(x.t().contiguous().t(), weight, EPS), expected)
    expanded = x[:1].expand(5, -1)
    assert torch.equal(rms_norm(expanded, weight, EPS), expected[:1].expand(5, -1))
    assert torch.equal(rms_norm(x.view(3, 4, 33), weight, EPS), expected.view(3, 4, 33))
    transposed = run(x.t().contiguous().t(), weight, x)
    for got, want in zip(transposed, run(x.clone(), weight.clone(), x), strict=True):
        assert torch.equal(got, want)


def test_rows_of_nan_and_infinity_do_not_leak(wide):
    x, weight = wide(0, 9, 130), wide(1, 130)
    expected = rms_norm(x, weight, EPS)
    dirty = x.clone()
    dirty[0], dirty[4], dirty[8] = float("nan"), float("inf"), -float("inf")
    clean = [1, 2, 3, 5, 6, 7]
    assert torch.equal(rms_norm(dirty, weight, EPS)[clean], expected[clean])
    assert rms_norm(dirty, weight, EPS)[[0, 4, 8]].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_and_two_threads_give_the_same_bits(wide, threads, dtype):
    x, weight, grad = (
        wide(s, *shape, dtype=dtype) for s, shape in ((0, (400, 577)), (1, (577,)), (2, (400, 577)))
    )
    with threads(1):
        one = run(x, weight, grad)
    with threads(2):
        two = run(x, weight, grad)
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_it_is_as_accurate_as_torch(wide, error, dtype, zero_centered):
    x, weight, grad = wide(0, 300, 577, dtype=dtype), wide(1, 577), wide(2, 300, 577, dtype=dtype)
    weight = weight.to(dtype)
    exact_x, exact_weight = (t.double().requires_grad_() for t in (x, weight))
    exact = torch.nn.functional.rms_norm(
        exact_x, (577,), exact_weight + 1 if zero_centered else exact_weight, EPS
    )
    exact_grads = torch.autograd.grad(exact, (exact_x, exact_weight), grad.double())
    ours = run(x, weight, grad, zero_centered)
    theirs_x, theirs_weight = (t.clone().requires_grad_() for t in (x, weight))
    theirs = torch.nn.functional.rms_norm(
        theirs_x, (577,), theirs_weight + 1 if zero_centered else theirs_weight, EPS
    )
    their_grads = torch.autograd.grad(theirs, (theirs_x, theirs_weight), grad)
    for got, other, want in zip(ours, (theirs, *their_grads), (exact, *exact_grads), strict=True):
        ours_error = error(got, want.detach())
        assert ours_error <= 1.2 * error(other.detach(), want.detach())
        assert ours_error < torch.finfo(dtype).eps


def test_large_fp16_values_do_not_overflow_the_mean_of_squares():
    x = torch.full((2, 100), 60000.0, dtype=torch.float16)
    assert torch.equal(rms_norm(x, torch.ones(100, dtype=torch.float16), EPS), torch.ones_like(x))


def test_the_forward_is_the_same_with_and_without_gradients(wide):
    x, weight = wide(0, 20, 577), wide(1, 577)
    with torch.no_grad():
        expected = rms_norm(x, weight, EPS)
    assert torch.equal(run(x, weight)[0], expected)


def test_the_backward_repeats_itself(wide):
    x, weight, grad = wide(0, 500, 577), wide(1, 577), wide(2, 500, 577)
    first = run(x, weight, grad)
    for got, want in zip(run(x, weight, grad), first, strict=True):
        assert torch.equal(got, want)


def test_trailing_rows_without_gradient_leave_the_weight_gradient_alone(wide):
    x, weight, grad = wide(0, 200, 64), wide(1, 64), wide(2, 200, 64)
    grad[150:] = 0
    assert torch.equal(run(x, weight, grad)[2], run(x[:150], weight, grad[:150])[2])


def test_a_weight_with_main_grad_accumulates_there_in_fp32(wide):
    x, grad = wide(0, 200, 64, dtype=torch.bfloat16), wide(1, 200, 64, dtype=torch.bfloat16)
    weight = wide(2, 64, dtype=torch.bfloat16)
    full = run(x.float(), weight.float(), grad.float())[2]
    weight.requires_grad_()
    weight.main_grad = start = wide(3, 64)
    expected = start + full
    rms_norm(x, weight, EPS).backward(grad)
    assert weight.grad is None
    assert torch.equal(weight.main_grad, expected)
    assert weight.main_grad is start


def test_empty_inputs_work():
    weight = torch.ones(8, requires_grad=True)
    y = rms_norm(torch.empty(0, 8, requires_grad=True), weight, EPS)
    assert y.shape == (0, 8)
    (grad,) = torch.autograd.grad(y.sum(), weight)
    assert torch.equal(grad, torch.zeros(8))
    assert rms_norm(torch.empty(3, 0), torch.empty(0), EPS).shape == (3, 0)


@pytest.mark.parametrize(
    ("x", "weight", "eps", "message"),
    [
        (torch.ones(2, 3), torch.ones(4), EPS, "last dimension of x must be 4"),
        (torch.ones(()), torch.ones(1), EPS, "last dimension of x"),
        (torch.ones(2, 3), torch.ones(1, 3), EPS, "weight must have 1 dimension"),
        (torch.ones(2, 3), torch.ones(3), -1.0, "eps must be finite and 0 or more, got -1.0"),
        (torch.ones(2, 3), torch.ones(3), float("nan"), "eps"),
    ],
)
def test_bad_arguments_are_named(x, weight, eps, message):
    with pytest.raises(InvalidInputError, match=message):
        rms_norm(x, weight, eps)


def test_float64_is_refused():
    with pytest.raises(UnsupportedError, match="float64"):
        rms_norm(torch.ones(2, 3, dtype=torch.float64), torch.ones(3), EPS)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_rms_norm_has_the_bits_of_its_two_steps(wide, dtype, zero_centered):
    x, residual = wide(0, 9, 130, dtype=dtype), wide(1, 9, 130, dtype=dtype)
    weight, grads = wide(2, 130, dtype=dtype), (wide(3, 9, 130), wide(4, 9, 130))
    leaves = [t.clone().requires_grad_() for t in (x, residual, weight)]
    results = add_rms_norm(leaves[0], leaves[1], leaves[2], 1e-6, zero_centered=zero_centered)
    torch.autograd.backward(results, [g.to(dtype) for g in grads])
    total = x + residual
    assert torch.equal(results[1], total)
    assert torch.equal(results[0], rms_norm(total, weight, 1e-6, zero_centered=zero_centered))
    part = add_rms_norm(x[3:5], residual[3:5], weight, 1e-6, zero_centered=zero_centered)
    assert torch.equal(part[0], results[0][3:5])
    assert torch.equal(leaves[0].grad, leaves[1].grad)


def test_add_rms_norm_refuses_a_residual_of_another_kind(wide):
    x, weight = wide(0, 2, 4), wide(1, 4)
    with pytest.raises(InvalidInputError, match="residual must have shape"):
        add_rms_norm(x, x[:1], weight, 1e-6)
    with pytest.raises(InvalidInputError, match="residual must have the dtype of x"):
        add_rms_norm(x, x.half(), weight, 1e-6)
