from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.kernels import (
    embedding,
    log_softmax,
    rms_norm,
    rotary,
    rotary_table,
    silu_and_mul,
    softmax,
)

BFLOAT = torch.bfloat16
DTYPES = [torch.float32, BFLOAT, torch.float16]


def gradients(function, leaves, grad):
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    return torch.autograd.grad(function(*leaves), leaves, grad)


def exact_norm(x, weight, eps=1e-6, zero_centered=False):
    scale = weight + 1 if zero_centered else weight
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * scale


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(34, 70), (3, 1100)])
def test_rms_norm_is_accurate_forward_and_backward(wide, error, dtype, zero_centered, rows, width):
    leaves = [wide(0, rows, width, dtype=dtype), torch.randn(width).to(dtype)]
    grad = torch.randn(rows, width).to(dtype)
    doubles = [leaf.double() for leaf in leaves]
    bound = 2 * torch.finfo(dtype).eps
    y = rms_norm(leaves[0], leaves[1], 1e-6, zero_centered=zero_centered)
    assert error(y, exact_norm(doubles[0], doubles[1], zero_centered=zero_centered)) < bound
    ours = gradients(lambda x, w: rms_norm(x, w, 1e-6, zero_centered=zero_centered), leaves, grad)
    theirs = gradients(
        lambda x, w: exact_norm(x, w, zero_centered=zero_centered), doubles, grad.double()
    )
    for value, expected in zip(ours, theirs, strict=True):
        assert error(value, expected) < 2 * bound


@pytest.mark.parametrize("function", [softmax, log_softmax, silu_and_mul])
@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT])
def test_row_functions_are_accurate_forward_and_backward(error, function, dtype):
    exact = {
        softmax: lambda x: x.softmax(-1),
        log_softmax: lambda x: x.log_softmax(-1),
        silu_and_mul: lambda x: functional.silu(x[..., :600]) * x[..., 600:],
    }[function]
    x = torch.randn(3, 1200).to(dtype)
    y = function(x)
    bound = 4 * torch.finfo(y.dtype).eps
    assert error(y, exact(x.double())) < bound
    grad = torch.randn(y.shape).to(y.dtype)
    (ours,) = gradients(function, [x], grad)
    (theirs,) = gradients(exact, [x.double()], grad.double())
    assert error(ours, theirs) < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    "function", [softmax, log_softmax, silu_and_mul, lambda x: rms_norm(x, x[0], 1e-6)]
)
def test_a_row_does_not_depend_on_its_neighbours(wide, function):
    x = wide(0, 6, 1100)
    y = function(x)
    bad = x.clone()
    bad[5], bad[4, 3] = float("nan"), float("inf")
    assert torch.equal(function(bad)[:4], y[:4])
    if function in (softmax, log_softmax, silu_and_mul):
        assert torch.equal(function(x[[3, 1]]), y[[3, 1]])


def test_the_last_row_of_a_batch_beyond_256_equals_the_row_alone(wide):
    x, weight = wide(0, 258, 64), wide(1, 64)
    assert torch.equal(rms_norm(x[257:], weight, 1e-6), rms_norm(x, weight, 1e-6)[257:])


def test_rows_without_a_softmax_become_nan_and_masked_entries_stay_masked():
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([[nan, 0, 1], [inf, 0, 1], [-inf, -inf, -inf], [-inf, 0, 0]])
    assert softmax(x)[:3].isnan().all()
    assert softmax(x)[3].tolist() == [0, 0.5, 0.5]
    assert log_softmax(x)[3, 0] == -inf


def test_a_product_of_the_rotation_is_rounded_before_it_is_added(wide):
    x, table = wide(0, 9, 3, 16), rotary_table(16, 40, 1e4)
    positions = torch.tensor([0, 39, 5, 5, 1, 2, 3, 4, 7])
    cosine, sine = (half[positions][:, None] for half in table.split(8, 1))
    a, b = x.split(8, 2)
    expected = torch.cat((a * cosine - b * sine, b * cosine + a * sine), 2)
    assert torch.equal(rotary(x, positions, table), expected)
    (back,) = gradients(lambda x: rotary(x, positions, table), [x], expected)
    assert torch.allclose(back, x, atol=1e-3)
    with pytest.raises(InvalidInputError, match="positions"):
        rotary(x, positions + 1, table)


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT])
def test_the_gradient_of_an_embedding_adds_occurrences_in_order(wide, dtype):
    table, ids = wide(0, 7, 300, dtype=dtype), torch.tensor([[3, 0, 3], [3, 6, 0]])
    grad = wide(1, 2, 3, 300, dtype=dtype)
    (ours,) = gradients(lambda w: embedding(ids, w), [table], grad)
    expected = torch.zeros(7, 300)
    for id, row in zip(ids.reshape(-1).tolist(), grad.reshape(-1, 300).float(), strict=True):
        expected[id] += row
    assert torch.equal(ours, expected.to(dtype))


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_empty_rows(shape):
    assert softmax(torch.zeros(shape)).shape == shape
    assert rms_norm(torch.zeros(shape), torch.zeros(shape[1]), 1e-6).shape == shape
    x = torch.zeros(shape, requires_grad=True)
    weight = torch.ones(shape[1], requires_grad=True)
    rms_norm(x, weight, 1e-6).sum().backward()
    assert weight.grad is not None and not weight.grad.any()


def test_fp64_is_refused():
    with pytest.raises(UnsupportedError, match="float64"):
        softmax(torch.zeros(1, 2, dtype=torch.float64))
