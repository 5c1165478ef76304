from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from consistency.kernels import add_rms_norm, addmm, bmm, layer_norm, matmul, mean, rms_norm
from consistency.kernels import sum as row_sum

BFLOAT = torch.bfloat16


def gradients(function, leaves, grad):
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    return torch.autograd.grad(function(*leaves), leaves, grad)


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT])
def test_layer_norm_is_accurate_forward_and_backward(error, dtype):
    leaves = [torch.randn(shape).to(dtype) for shape in ((34, 70), (70,), (70,))]
    grad = torch.randn(34, 70).to(dtype)
    doubles = [leaf.double() for leaf in leaves]

    def exact(x, weight, bias):
        return functional.layer_norm(x, (70,), weight, bias, 1e-5)

    bound = 4 * torch.finfo(dtype).eps
    assert error(layer_norm(leaves[0], leaves[1], leaves[2], 1e-5), exact(*doubles)) < bound
    ours = gradients(lambda x, w, b: layer_norm(x, w, b, 1e-5), leaves, grad)
    theirs = gradients(exact, doubles, grad.double())
    for value, expected in zip(ours, theirs, strict=True):
        assert error(value, expected) < 2 * bound


def test_a_layer_norm_without_parameters_subtracts_a_large_mean(error):
    x = torch.randn(3, 1030) + 3e4
    exact = functional.layer_norm(x.double(), (1030,), eps=1e-5)
    # The mean is known to 3e4 * 2^-24; a variance from one pass would have no digit left.
    assert error(layer_norm(x, None, None, 1e-5), exact) < 1e-2


def test_a_norm_of_a_residual_reads_the_rounded_sum(wide):
    x, residual, weight = wide(0, 3, 40, dtype=BFLOAT), wide(1, 3, 40, dtype=BFLOAT), wide(2, 40)
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(total, weight, 1e-6))


def test_a_mean_of_large_float16_numbers_does_not_overflow():
    x = torch.full((2, 3000), 60000.0, dtype=torch.float16)
    assert torch.equal(mean(x, 1), x[:, 0])


def test_sums_over_any_dimensions_and_of_nothing(wide, error):
    x = wide(0, 3, 5, 7)
    for dim in (None, 0, 1, (0, 2), -1):
        assert error(row_sum(x, dim), x.double().sum(dim)) < 1e-5
    assert row_sum(torch.zeros(2, 0), 1).tolist() == [0, 0]
    assert mean(torch.zeros(2, 0), 1).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT])
def test_each_matrix_of_a_batch_is_a_matmul(wide, dtype):
    a, b = wide(0, 3, 5, 128, dtype=dtype), wide(1, 3, 128, 20, dtype=dtype)
    for whole in (False, True):
        y = bmm(a, b, tp_invariant=whole)
        expected = [matmul(p, q, tp_invariant=whole) for p, q in zip(a, b, strict=True)]
        assert torch.equal(y, torch.stack(expected))
    expanded = bmm(a, b[:1].expand(3, 128, 20))
    assert torch.equal(expanded[2], matmul(a[2], b[0]))


def test_addmm_scales_in_fp32_and_ignores_a_bias_times_zero(wide, error):
    bias, a, b = wide(0, 6), wide(1, 4, 40), wide(2, 40, 6)
    exact = 0.5 * bias.double() + 3 * (a.double() @ b.double())
    assert error(addmm(bias, a, b, alpha=3.0, beta=0.5), exact) < 1e-5
    broken = torch.full((6,), float("nan"))
    assert torch.equal(addmm(broken, a, b, beta=0.0), matmul(a, b))
