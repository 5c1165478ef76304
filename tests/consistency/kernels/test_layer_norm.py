from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.kernels import layer_norm, library

BFLOAT = torch.bfloat16
DTYPES = st.sampled_from([torch.float32, BFLOAT, torch.float16])
EPS = 1e-5


def run(x, weight, bias, grad):
    leaves = [t if t is None else t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    leaf = leaves[0]
    assert leaf is not None
    y = layer_norm(leaf, leaves[1], leaves[2], EPS)
    wanted = [t for t in leaves if t is not None]
    return y.detach(), *torch.autograd.grad(y, wanted, grad)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 40),
    width=st.one_of(st.integers(1, 70), st.sampled_from([576, 1024, 1025, 2500])),
    dtype=DTYPES,
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_a_row_and_its_gradient_do_not_depend_on_the_batch(wide, rows, width, dtype, seed, data):
    x, grad = wide(seed, rows, width, dtype=dtype), wide(seed + 1, rows, width, dtype=dtype)
    weight, bias = wide(seed + 2, width, dtype=dtype), wide(seed + 3, width, dtype=dtype)
    y, grad_x, *_ = run(x, weight, bias, grad)
    picked = data.draw(st.lists(st.integers(0, rows - 1), max_size=50)) if rows else []
    part, grad_part, *_ = run(x[picked], weight, bias, grad[picked])
    assert torch.equal(part, y[picked])
    assert torch.equal(grad_part, grad_x[picked])


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT, torch.float16])
@pytest.mark.parametrize("width", [64, 1000, 4096])
def test_the_error_against_float64_is_no_larger_than_torchs(error, dtype, width):
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(64, width, generator=generator) * 3 + torch.randn(64, 1, generator=generator)
    weight, bias = (torch.randn(width, generator=generator).to(dtype) for _ in range(2))
    grad = torch.randn(64, width, generator=generator).to(dtype)
    x = x.to(dtype)
    exact_leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    exact = torch.nn.functional.layer_norm(
        exact_leaves[0], (width,), exact_leaves[1], exact_leaves[2], EPS
    )
    references = [exact.detach(), *torch.autograd.grad(exact, exact_leaves, grad.double())]
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    theirs = torch.nn.functional.layer_norm(leaves[0], (width,), leaves[1], leaves[2], EPS)
    torchs = [theirs.detach(), *torch.autograd.grad(theirs, leaves, grad)]
    mine = run(x, weight, bias, grad)
    for ours, their, reference in zip(mine, torchs, references, strict=True):
        assert error(ours, reference) <= error(their, reference) * 1.05 + 2e-8


@pytest.mark.parametrize("rows", [1, 7, 300])
def test_one_thread_equals_two_and_runs_repeat(wide, threads, rows):
    arguments = wide(0, rows, 1300), wide(1, 1300), wide(2, 1300), wide(3, rows, 1300)
    with threads(1):
        one = run(*arguments)
    with threads(2):
        two, again = run(*arguments), run(*arguments)
    for a, b, c in zip(one, two, again, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(b, c)


def test_weight_and_bias_may_be_absent(wide):
    x, grad = wide(0, 5, 90), wide(1, 5, 90)
    ones, zeros = torch.ones(90), torch.zeros(90)
    assert torch.equal(layer_norm(x, None, None, EPS), layer_norm(x, ones, zeros, EPS))
    assert torch.equal(run(x, None, None, grad)[1], run(x, ones, zeros, grad)[1])


def test_a_row_far_from_zero_keeps_its_variance(error):
    x = torch.randn(4, 512, generator=torch.Generator().manual_seed(0)) + 1e4
    exact = torch.nn.functional.layer_norm(x.double(), (512,), None, None, EPS)
    # The mean is rounded to fp32, half a unit in its last place is 5e-4.
    assert error(layer_norm(x, None, None, EPS), exact) < 5e-4


def test_main_grad_receives_the_gradients(wide):
    x, weight, bias = wide(0, 20, 40), wide(1, 40), wide(2, 40)
    grad = wide(3, 20, 40)
    expected = run(x, weight, bias, grad)
    weight, bias = weight.requires_grad_(), bias.requires_grad_()
    before = wide(4, 40)
    weight.main_grad, bias.main_grad = before.clone(), before.clone()
    layer_norm(x, weight, bias, EPS).backward(grad)
    assert weight.grad is None
    assert bias.grad is None
    assert torch.equal(weight.main_grad, before + expected[2])
    assert torch.equal(bias.main_grad, before + expected[3])


def test_strides_change_no_bit_and_bad_rows_stay_alone(wide):
    x, weight, bias = wide(0, 6, 50), wide(1, 50), wide(2, 50)
    expected = layer_norm(x, weight, bias, EPS)
    assert torch.equal(layer_norm(x.t().contiguous().t(), weight, bias, EPS), expected)
    assert torch.equal(
        layer_norm(x[:1].expand(6, 50), weight, bias, EPS), expected[:1].expand(6, 50)
    )
    x[1, 3], x[4, 0] = float("nan"), float("inf")
    y = layer_norm(x, weight, bias, EPS)
    assert y[[1, 4]].isnan().all()
    assert torch.equal(y[[0, 2, 3, 5]], expected[[0, 2, 3, 5]])


def test_every_instruction_set_gives_the_same_bits(wide, monkeypatch):
    import importlib

    module = importlib.import_module("consistency.kernels.layer_norm")
    arguments = wide(0, 9, 1100), wide(1, 1100), wide(2, 1100), wide(3, 9, 1100)
    results = []
    for variant in library.runnable_variants():
        with monkeypatch.context() as patch:
            for name in ("_forward_kernel", "_backward_kernel"):
                patch.setattr(module, name, getattr(module, name).on(variant))
            results.append(run(*arguments))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_empty_inputs():
    assert layer_norm(torch.empty(0, 4), torch.ones(4), None, EPS).shape == (0, 4)
    assert layer_norm(torch.empty(3, 0), torch.ones(0), torch.ones(0), EPS).shape == (3, 0)


def test_what_does_not_fit_is_refused():
    x = torch.zeros(2, 4)
    with pytest.raises(InvalidInputError, match=r"weight must have shape \(4,\)"):
        layer_norm(x, torch.ones(3), None, EPS)
    with pytest.raises(InvalidInputError, match="eps"):
        layer_norm(x, None, None, -1.0)
    with pytest.raises(InvalidInputError, match="scalar"):
        layer_norm(torch.tensor(1.0), None, None, EPS)
    with pytest.raises(UnsupportedError, match="bias has dtype"):
        layer_norm(x, None, torch.ones(4, dtype=torch.float64), EPS)
