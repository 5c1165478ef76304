"""matmul: the product of two matrices of any strides, with the order of `linear`."""

from __future__ import annotations

from typing import Any

import torch

from consistency.errors import InvalidInputError
from consistency.kernels._arguments import output_dtype_code, require_float
from consistency.kernels._autograd import once_differentiable
from consistency.kernels._dispatch import one_device
from consistency.kernels._gemm import chunk_count, multiply


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
