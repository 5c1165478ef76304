from __future__ import annotations

import pytest
import torch

from consistency.errors import UnsupportedError
from consistency.kernels import (
    grouped_linear,
    join_partials,
    linear,
    matmul,
    row_parallel_partial,
)
from consistency.kernels.triton import gemm
from consistency.kernels.triton.tiles import Tile

BFLOAT = torch.bfloat16
DTYPES = [torch.float32, BFLOAT, torch.float16]


def run(x, weight, grad, **options):
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = linear(x, weight, **options)
    return y.detach(), *torch.autograd.grad(y, (x, weight), grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tp_invariant", [False, True])
def test_a_row_and_its_gradient_do_not_depend_on_the_batch(wide, dtype, tp_invariant):
    x, weight, grad = (
        wide(0, 35, 256, dtype=dtype),
        wide(1, 65, 256, dtype=dtype),
        wide(2, 35, 65, dtype=dtype),
    )
    y, grad_x, _ = run(x, weight, grad, tp_invariant=tp_invariant)
    for rows in ([5], [34, 0, 5]):
        part, grad_part, _ = run(x[rows], weight, grad[rows], tp_invariant=tp_invariant)
        assert torch.equal(part, y[rows])
        assert torch.equal(grad_part, grad_x[rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_and_gradients_are_accurate(wide, error, dtype):
    x, weight, grad = (
        torch.randn(20, 70, dtype=dtype),
        torch.randn(45, 70, dtype=dtype),
        torch.randn(20, 45, dtype=dtype),
    )
    bias = torch.randn(45, dtype=dtype, requires_grad=True)
    leaves = x.requires_grad_(), weight.requires_grad_(), bias
    y = linear(*leaves)
    grads = torch.autograd.grad(y, leaves, grad)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = torch.nn.functional.linear(*exact)
    bound = 4 * torch.finfo(dtype).eps
    assert error(y.detach(), expected.detach()) < bound
    for value, wanted in zip(
        grads, torch.autograd.grad(expected, exact, grad.double()), strict=True
    ):
        assert error(value, wanted) < bound


def test_chunks_in_parallel_and_in_sequence_give_the_same_bits(wide):
    a, b = wide(0, 33, 512), wide(1, 512, 50)
    tile = Tile(32, 32, 32, 4, 1)
    out = [torch.empty(33, 50) for _ in range(2)]
    gemm.multiply_in_sequence(a, b, out[0], tile, chunks=8)
    gemm.multiply_split(a, b, out[1], tile, chunks=8)
    assert torch.equal(*out)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_row_parallel_ranks_finish_the_tree_of_the_whole(wide, ranks):
    x, weight, bias = wide(0, 3, 512), wide(1, 20, 512), wide(2, 20)
    partials = [
        row_parallel_partial(part, share, chunks=8 // ranks)
        for part, share in zip(x.chunk(ranks, 1), weight.chunk(ranks, 1), strict=True)
    ]
    whole = linear(x, weight, bias, tp_invariant=True)
    assert torch.equal(join_partials(partials, bias), whole)


def test_a_ranks_chunk_that_is_no_multiple_of_the_tile_is_reduced_whole(error):
    x, weight = torch.randn(3, 144), torch.randn(5, 144)
    partial = row_parallel_partial(x, weight, chunks=4)
    assert error(partial, x.double() @ weight.double().t()) < 1e-6


def test_operands_of_any_strides_give_the_same_bits(wide):
    x, weight = wide(0, 5, 130, dtype=BFLOAT), wide(1, 35, 130, dtype=BFLOAT)
    expected = linear(x, weight)
    strided = torch.zeros(5, 260, dtype=BFLOAT)
    strided[:, ::2] = x
    assert torch.equal(linear(strided[:, ::2], weight), expected)
    assert torch.equal(linear(x, weight.t().contiguous().t()), expected)
    assert torch.equal(matmul(x, weight.t()), expected)
    assert torch.equal(linear(x[:1].expand(7, 130), weight)[6], expected[0])


def test_operands_of_two_dtypes_multiply_in_true_fp32(error):
    x, weight = torch.randn(4, 64), torch.randn(9, 64, dtype=BFLOAT)
    assert error(linear(x, weight), x.double() @ weight.double().t()) < 1e-6


def test_fp32_products_are_not_rounded_to_tf32():
    x = torch.zeros(1, 32)
    x[0, 7] = 2049.0
    assert linear(x, x).item() == 2049.0**2


@pytest.mark.parametrize("shape", [(0, 4, 5), (3, 0, 5), (3, 4, 0)])
def test_empty_products(shape):
    rows, outputs, width = shape
    bias = torch.ones(outputs)
    y = linear(torch.ones(rows, width), torch.ones(outputs, width), bias)
    assert torch.equal(y, torch.full((rows, outputs), width + 1.0))


def test_infinities_and_nans_stay_in_their_rows(wide):
    x, weight = wide(0, 4, 40), wide(1, 9, 40)
    clean = linear(x, weight)
    x[1, 3], x[2, 0] = float("nan"), float("inf")
    y = linear(x, weight)
    assert y[1].isnan().all() and not y[2].isfinite().any()
    assert torch.equal(y[[0, 3]], clean[[0, 3]])


def test_main_grad_receives_the_sum_of_two_backwards(wide):
    x, weight = wide(0, 6, 40), wide(1, 9, 40).requires_grad_()
    buffer = torch.zeros(9, 40)
    weight.main_grad = buffer  # type: ignore[attr-defined]
    for _ in range(2):
        linear(x, weight).backward(torch.ones(6, 9))
    plain = weight.detach().clone().requires_grad_()
    linear(x, plain).backward(torch.ones(6, 9))
    assert weight.grad is None and plain.grad is not None
    assert torch.equal(buffer, 2 * plain.grad)


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT])
def test_each_expert_is_a_linear_of_its_rows(wide, dtype):
    x, weight = wide(0, 50, 128, dtype=dtype), wide(1, 4, 40, 128, dtype=dtype)
    grad = wide(2, 50, 40, dtype=dtype)
    offsets = torch.tensor([0, 35, 35, 36, 50])
    x, weight = x.requires_grad_(), weight.requires_grad_()
    y = grouped_linear(x, weight, offsets, tp_invariant=True)
    grad_x, grad_weight = torch.autograd.grad(y, (x, weight), grad)
    for expert in range(4):
        rows = slice(int(offsets[expert]), int(offsets[expert + 1]))
        part, part_x, part_weight = run(x[rows], weight[expert], grad[rows], tp_invariant=True)
        assert torch.equal(y[rows], part)
        assert torch.equal(grad_x[rows], part_x)
        assert torch.equal(grad_weight[expert], part_weight)


def test_an_expert_without_rows_leaves_its_main_grad_untouched():
    x, weight = torch.ones(3, 8), torch.ones(2, 5, 8, requires_grad=True)
    buffer = torch.full((2, 5, 8), -0.0)
    weight.main_grad = buffer  # type: ignore[attr-defined]
    grouped_linear(x, weight, torch.tensor([0, 0, 3])).backward(torch.ones(3, 5))
    assert torch.equal(buffer[0].signbit(), torch.ones(5, 8, dtype=torch.bool))
    assert torch.equal(buffer[1], torch.full((5, 8), 3.0))


def test_fp64_is_refused():
    with pytest.raises(UnsupportedError, match="float64"):
        linear(torch.zeros(1, 2, dtype=torch.float64), torch.zeros(1, 2))
