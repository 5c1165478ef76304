from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.kernels import log_softmax, softmax

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
OPS = [softmax, log_softmax]
both = pytest.mark.parametrize("op", OPS)


def run(op, x, grad):
    x = x.detach().requires_grad_()
    y = op(x)
    return y.detach(), torch.autograd.grad(y, x, grad)[0]


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(OPS),
    st.integers(1, 20),
    st.integers(1, 500),
    DTYPES,
    st.integers(0, 10**6),
    st.data(),
)
def test_a_rows_result_and_gradient_do_not_depend_on_its_batch(
    wide, op, rows, width, dtype, seed, data
):
    x, grad = wide(seed, rows, width, dtype=dtype), wide(seed + 1, rows, width)
    y, grad_x = run(op, x, grad)
    picked = data.draw(st.lists(st.integers(0, rows - 1), max_size=30))
    y_part, grad_part = run(op, x[picked], grad[picked])
    assert torch.equal(y_part, y[picked])
    assert torch.equal(grad_part, grad_x[picked])


@both
def test_a_very_wide_row_is_the_same_alone_and_on_more_threads(wide, threads, op):
    x, grad = wide(0, 4, 50_001), wide(1, 4, 50_001)
    with threads(1):
        one = run(op, x, grad)
    with threads(2):
        two = run(op, x, grad)
        alone = run(op, x[2:3], grad[2:3])
    for a, b, c in zip(one, two, alone, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a[2:3], c)


@both
def test_strided_expanded_and_transposed_inputs_give_the_same_bits(wide, op):
    x, grad = wide(0, 12, 66)[:, ::2], wide(1, 12, 33)
    got = run(op, x.t().contiguous().t(), grad.t().contiguous().t())
    for a, b in zip(got, run(op, x.clone(), grad), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(op(x[:1].expand(4, -1)), op(x[:1].clone()).expand(4, -1))
    assert torch.equal(op(x.view(3, 4, 33)), op(x).view(3, 4, 33))
    assert torch.equal(op(x[0]), op(x)[0])


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_as_accurate_as_torch(wide, error, op, dtype):
    reference = torch.softmax if op is softmax else torch.log_softmax
    x, grad = wide(0, 30, 3001, dtype=dtype), wide(1, 30, 3001)
    exact_x, their_x = x.double().requires_grad_(), x.float().requires_grad_()
    exact, theirs = reference(exact_x, -1), reference(their_x, -1)
    (exact_grad,) = torch.autograd.grad(exact, exact_x, grad.double())
    (their_grad,) = torch.autograd.grad(theirs, their_x, grad)
    y, grad_x = run(op, x, grad)
    assert y.dtype == torch.float32
    assert error(y, exact.detach()) <= max(1.2 * error(theirs.detach(), exact.detach()), 6e-8)
    assert error(grad_x, exact_grad) <= max(
        1.2 * error(their_grad.to(dtype), exact_grad), torch.finfo(dtype).eps
    )


def test_the_probabilities_of_a_row_sum_to_one(wide):
    assert (softmax(wide(0, 20, 1000)).double().sum(1) - 1).abs().max() < 1e-6


def test_log_softmax_keeps_the_digits_of_small_probabilities():
    y = log_softmax(torch.tensor([[0.0, -200.0]]))
    assert torch.equal(y, torch.tensor([[0.0, -200.0]]))


@both
def test_masked_entries_get_no_probability(op):
    x = torch.tensor([[float("-inf"), 1.0, float("-inf"), 1.0]])
    y = softmax(x) if op is softmax else log_softmax(x).exp()
    assert torch.allclose(y, torch.tensor([[0.0, 0.5, 0.0, 0.5]]), atol=1e-7)
    assert y[0, 0] == 0


@both
def test_rows_of_nan_or_infinity_become_nan_and_do_not_leak(wide, op):
    x = wide(0, 6, 40)
    expected = op(x)
    x[1, 3], x[3, 0] = float("nan"), float("inf")
    x[5] = float("-inf")
    y = op(x)
    assert torch.equal(y[[0, 2, 4]], expected[[0, 2, 4]])
    assert y[[1, 3, 5]].isnan().any(dim=1).all()
    assert y[[1, 5]].isnan().all()


@both
def test_the_forward_is_the_same_with_and_without_gradients(wide, op):
    x = wide(0, 20, 577)
    assert torch.equal(run(op, x, wide(1, 20, 577))[0], op(x))


@both
def test_empty_inputs_work(op):
    assert op(torch.empty(0, 8)).shape == (0, 8)
    assert op(torch.empty(3, 0)).shape == (3, 0)


@both
def test_bad_arguments_are_named(op):
    with pytest.raises(InvalidInputError, match="scalar"):
        op(torch.tensor(1.0))
    with pytest.raises(UnsupportedError, match="float64"):
        op(torch.ones(2, 3, dtype=torch.float64))
