"""matmul, bmm and addmm: products of matrices of any strides, with the order of `linear`."""

from __future__ import annotations

from typing import Any

import torch

from consistency.errors import InvalidInputError
from consistency.kernels._arguments import output_dtype_code, require_float, require_shape
from consistency.kernels._autograd import once_differentiable
from consistency.kernels._dispatch import one_device
from consistency.kernels._gemm import chunk_count, multiply, multiply_batched
from consistency.kernels.reductions import sum as sum_over


@one_device
def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    tp_invariant: bool = False,
) -> torch.Tensor:
    """c[m, n] = sum over k of a[m, k] b[k, n].

    Args:
        a: [M, K], float32, bfloat16 or float16, any strides; nothing is copied.
        b: [K, N], likewise; its dtype may differ from that of `a`.
        out_dtype: dtype of the result; by default that of `a`.
        tp_invariant: cut K into chunks, as in `linear`.

    Returns:
        [M, N] in `out_dtype`.

    Raises:
        UnsupportedError: a dtype, layout or device that the kernels do not take.
        InvalidInputError: shapes that do not fit.

    Order of reduction:
        That of `linear`: matmul(x, weight.t()) and linear(x, weight) are equal bit for bit. In the
        backward, da reduces over N by the same rule, db over M in order, in one chunk.
    """
    require_float("a", a, 2)
    require_float("b", b, 2)
    if a.shape[1] != b.shape[0]:
        raise InvalidInputError(
            f"a {tuple(a.shape)} and b {tuple(b.shape)} do not fit: the second dimension of a must "
            "equal the first of b"
        )
    if out_dtype is None:
        out_dtype = a.dtype
    else:
        output_dtype_code(out_dtype)
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return _Matmul.apply(a, b, out_dtype, tp_invariant)
    return _forward(a, b, out_dtype, tp_invariant)


@one_device
def bmm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    tp_invariant: bool = False,
) -> torch.Tensor:
    """c[i] = a[i] @ b[i] for every i of a batch.

    Args:
        a: [B, M, K], float32, bfloat16 or float16, any strides; nothing is copied.
        b: [B, K, N], likewise.
        out_dtype: dtype of the result; by default that of `a`.
        tp_invariant: cut K into chunks, as in `linear`.

    Returns:
        [B, M, N] in `out_dtype`.

    Raises:
        UnsupportedError: a dtype, layout or device that the kernels do not take.
        InvalidInputError: shapes that do not fit.

    Order of reduction:
        That of `matmul` for every i, forward and backward.
    """
    require_float("a", a, 3)
    require_float("b", b, 3)
    require_shape("b", b, (a.shape[0], a.shape[2], b.shape[2]), "the batch and columns of a, N")
    if out_dtype is None:
        out_dtype = a.dtype
    else:
        output_dtype_code(out_dtype)
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return _Bmm.apply(a, b, out_dtype, tp_invariant)
    return _forward_batched(a, b, out_dtype, tp_invariant)


@one_device
def addmm(
    bias: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    out_dtype: torch.dtype | None = None,
    tp_invariant: bool = False,
) -> torch.Tensor:
    """beta * bias + alpha * (a @ b), in fp32 with one rounding at the end.

    Args:
        bias: any shape that broadcasts to [M, N]; not read when `beta` is 0.
        a: [M, K], float32, bfloat16 or float16, any strides.
        b: [K, N], likewise.
        alpha: the factor of the product.
        beta: the factor of the bias.
        out_dtype: dtype of the result; by default that of `a`.
        tp_invariant: cut K into chunks, as in `linear`.

    Returns:
        [M, N] in `out_dtype`.

    Raises:
        UnsupportedError: a dtype, layout or device that the kernels do not take.
        InvalidInputError: shapes that do not fit.

    Order of reduction:
        That of `matmul`; then the product times alpha, the bias times beta, their sum. The gradient
        of a bias that was broadcast is a `sum` over the dimensions along which it was.
    """
    require_float("bias", bias)
    require_float("a", a, 2)
    require_float("b", b, 2)
    if a.shape[1] != b.shape[0]:
        raise InvalidInputError(
            f"a {tuple(a.shape)} and b {tuple(b.shape)} do not fit: the second dimension of a must "
            "equal the first of b"
        )
    shape = (a.shape[0], b.shape[1])
    padded = (1,) * (2 - bias.dim()) + tuple(bias.shape)
    if len(padded) != 2 or any(
        have not in (1, want) for have, want in zip(padded, shape, strict=True)
    ):
        raise InvalidInputError(f"bias {tuple(bias.shape)} does not broadcast to {shape}")
    if out_dtype is None:
        out_dtype = a.dtype
    else:
        output_dtype_code(out_dtype)
    return _Addmm.apply(bias, a, b, float(alpha), float(beta), out_dtype, tp_invariant)


def _forward(
    a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, tp_invariant: bool
) -> torch.Tensor:
    out = torch.empty((a.shape[0], b.shape[1]), dtype=out_dtype, device=a.device)
    return multiply(a, b, out, chunks=chunk_count(a.shape[1], tp_invariant))


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, tp_invariant: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.tp_invariant = tp_invariant
        return _forward(a, b, out_dtype, tp_invariant)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        a, b = ctx.saved_tensors
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_a = torch.empty(a.shape, dtype=a.dtype, device=a.device)
            multiply(grad, b.t(), grad_a, chunks=chunk_count(b.shape[1], ctx.tp_invariant))
        if ctx.needs_input_grad[1]:
            grad_b = multiply(a.t(), grad, torch.empty(b.shape, dtype=b.dtype, device=b.device))
        return grad_a, grad_b, None, None


def _forward_batched(
    a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, tp_invariant: bool
) -> torch.Tensor:
    out = a.new_empty((*a.shape[:2], b.shape[2]), dtype=out_dtype)
    return multiply_batched(a, b, out, chunks=chunk_count(a.shape[2], tp_invariant))


class _Bmm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, tp_invariant: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.tp_invariant = tp_invariant
        return _forward_batched(a, b, out_dtype, tp_invariant)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        a, b = ctx.saved_tensors
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_a = _forward_batched(grad, b.mT, a.dtype, ctx.tp_invariant)
        if ctx.needs_input_grad[1]:
            grad_b = _forward_batched(a.mT, grad, b.dtype, False)
        return grad_a, grad_b, None, None


class _Addmm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        bias: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        alpha: float,
        beta: float,
        out_dtype: torch.dtype,
        tp_invariant: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.shape, ctx.dtype = bias.shape, bias.dtype
        ctx.alpha, ctx.beta, ctx.tp_invariant = alpha, beta, tp_invariant
        chunks = chunk_count(a.shape[1], tp_invariant)
        shape = (a.shape[0], b.shape[1])
        if alpha == 1.0 and beta == 1.0 and bias.dim() == 1 and bias.shape[0] == shape[1]:
            out = a.new_empty(shape, dtype=out_dtype)
            return multiply(a, b, out, bias=bias.contiguous(), chunks=chunks)
        total = multiply(a, b, a.new_empty(shape, dtype=torch.float32), chunks=chunks)
        if alpha != 1.0:
            total *= alpha
        if beta != 0.0:
            total += bias.float() * beta
        return total.to(out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        a, b = ctx.saved_tensors
        grad_bias = grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            padded = (1,) * (2 - len(ctx.shape)) + tuple(ctx.shape)
            dims = [i for i in range(2) if padded[i] == 1 and grad.shape[i] != 1]
            total = sum_over(grad, dims, out_dtype=torch.float32) if dims else grad.float()
            grad_bias = (total * ctx.beta).reshape(ctx.shape).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            chunks = chunk_count(b.shape[1], ctx.tp_invariant)
            grad_a = _scaled_product(grad, b.t(), ctx.alpha, a.dtype, chunks)
        if ctx.needs_input_grad[2]:
            grad_b = _scaled_product(a.t(), grad, ctx.alpha, b.dtype, 1)
        return grad_bias, grad_a, grad_b, None, None, None, None


def _scaled_product(
    a: torch.Tensor, b: torch.Tensor, alpha: float, dtype: torch.dtype, chunks: int
) -> torch.Tensor:
    wide = torch.float32 if alpha != 1.0 else dtype
    product = multiply(a, b, a.new_empty((a.shape[0], b.shape[1]), dtype=wide), chunks=chunks)
    return product if alpha == 1.0 else product.mul_(alpha).to(dtype)
