from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.kernels import silu_and_mul

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def run(x, grad):
    x = x.detach().requires_grad_()
    y = silu_and_mul(x)
    return y.detach(), torch.autograd.grad(y, x, grad)[0]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 30), st.integers(1, 300), DTYPES, st.integers(0, 10**6), st.data())
def test_a_rows_result_and_gradient_do_not_depend_on_its_batch(wide, rows, half, dtype, seed, data):
    x, grad = wide(seed, rows, 2 * half, dtype=dtype), wide(seed + 1, rows, half, dtype=dtype)
    y, grad_x = run(x, grad)
    picked = data.draw(st.lists(st.integers(0, rows - 1), max_size=40))
    y_part, grad_part = run(x[picked], grad[picked])
    assert torch.equal(y_part, y[picked])
    assert torch.equal(grad_part, grad_x[picked])


def test_an_elements_bits_do_not_depend_on_its_column(wide):
    gate, up = wide(0, 1, 300), wide(1, 1, 300)
    whole = silu_and_mul(torch.cat((gate, up), dim=1))
    for start, stop in ((0, 1), (5, 22), (17, 300)):
        part = silu_and_mul(torch.cat((gate[:, start:stop], up[:, start:stop]), dim=1))
        assert torch.equal(part, whole[:, start:stop])


def test_strided_and_expanded_inputs_give_the_same_bits(wide):
    x, grad = wide(0, 10, 132)[:, ::2], wide(1, 10, 33)
    for got, want in zip(
        run(x.t().contiguous().t(), grad.t().contiguous().t()), run(x.clone(), grad), strict=True
    ):
        assert torch.equal(got, want)
    assert torch.equal(silu_and_mul(x[:1].expand(4, -1)), silu_and_mul(x[:1].clone()).expand(4, -1))
    assert torch.equal(silu_and_mul(x.view(2, 5, 66)), silu_and_mul(x).view(2, 5, 33))


def test_one_and_two_threads_give_the_same_bits(wide, threads):
    x, grad = wide(0, 100, 1000), wide(1, 100, 500)
    with threads(1):
        one = run(x, grad)
    with threads(2):
        two = run(x, grad)
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[1], two[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_as_accurate_as_torch(wide, error, dtype):
    x, grad = wide(0, 50, 600, dtype=dtype), wide(1, 50, 300, dtype=dtype)

    def formula(x):
        return torch.nn.functional.silu(x[:, :300]) * x[:, 300:]

    exact_x, their_x = x.double().requires_grad_(), x.clone().requires_grad_()
    exact, theirs = formula(exact_x), formula(their_x)
    (exact_grad,) = torch.autograd.grad(exact, exact_x, grad.double())
    (their_grad,) = torch.autograd.grad(theirs, their_x, grad)
    pairs = zip(run(x, grad), (theirs, their_grad), (exact, exact_grad), strict=True)
    for got, other, want in pairs:
        assert error(got, want.detach()) <= 1.2 * error(other.detach(), want.detach())
        assert error(got, want.detach()) < torch.finfo(dtype).eps


def test_extreme_gates_saturate_instead_of_overflowing():
    gates = torch.tensor([-1e30, -200.0, -89.0, 0.0, 89.0, 200.0, 1e30])
    y, grad = run(torch.cat((gates, torch.ones(7)))[None], torch.ones(1, 7))
    assert torch.equal(y[0], torch.tensor([0.0, 0, 0, 0, 89, 200, 1e30])) or y[0, 2].abs() < 1e-36
    assert torch.equal(y[0, 3:], gates[3:])
    assert grad.isfinite().all()


def test_nan_does_not_leave_its_element(wide):
    x = wide(0, 3, 64)
    expected = silu_and_mul(x)
    x[1, 5] = float("nan")
    y = silu_and_mul(x)
    assert y[1, 5].isnan()
    y[1, 5] = expected[1, 5]
    assert torch.equal(y, expected)


def test_the_forward_is_the_same_with_and_without_gradients(wide):
    x = wide(0, 20, 96)
    assert torch.equal(run(x, wide(1, 20, 48))[0], silu_and_mul(x))


def test_empty_inputs_work():
    assert silu_and_mul(torch.empty(0, 8)).shape == (0, 4)
    assert silu_and_mul(torch.empty(3, 0)).shape == (3, 0)


def test_bad_arguments_are_named():
    with pytest.raises(InvalidInputError, match="last dimension of gate_up must be even"):
        silu_and_mul(torch.ones(2, 3))
    with pytest.raises(UnsupportedError, match=r"float64.*convert"):
        silu_and_mul(torch.ones(2, 4, dtype=torch.float64))
