"""sum and mean over any dimensions, with one order of addition per number of terms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from consistency.errors import InvalidInputError
from consistency.kernels._arguments import DTYPE_CODES, output_dtype_code, require_float
from consistency.kernels._autograd import once_differentiable
from consistency.kernels._dispatch import on_triton, one_device, triton_kernels
from consistency.kernels.library import FLOAT, INT32, INT64, POINTER, Kernel, thread_count

if TYPE_CHECKING:
    from collections.abc import Sequence

_row_sums = Kernel("lockstep_row_sums", POINTER, INT32, POINTER, INT32, INT64, INT64, FLOAT, INT32)


@one_device
def sum(
    x: torch.Tensor,
    dim: int | Sequence[int] | None = None,
    *,
    keepdim: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The sum over the dimensions `dim`, added in fp32 and rounded once.

    Args:
        x: float32, bfloat16 or float16, any shape and strides.
        dim: a dimension, several, or None for all.
        keepdim: keep the reduced dimensions, with size 1.
        out_dtype: dtype of the result; by default that of `x`.

    Returns:
        The shape of `x` without the reduced dimensions. A sum of nothing is 0.

    Raises:
        UnsupportedError: a dtype, layout or device that the kernels do not take.
        InvalidInputError: a dimension that does not exist, or is named twice.

    Order of reduction:
        The terms of one result in the order of their indices, the last dimension fastest: segments
        of 256 fold into 16 lanes by index modulo 16; lanes and segments are joined by binary trees
        that depend on the number of terms alone. Reducing any but the last dimensions copies `x`.
    """
    return _reduce(x, dim, keepdim, out_dtype, average=False)


@one_device
def mean(
    x: torch.Tensor,
    dim: int | Sequence[int] | None = None,
    *,
    keepdim: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`sum` divided by the number of terms, in fp32, before the one rounding.

    Arguments, result, exceptions and order of reduction are those of `sum`. A mean of nothing is
    NaN. A mean of float16 numbers does not overflow while it adds.
    """
    return _reduce(x, dim, keepdim, out_dtype, average=True)


def _reduce(
    x: torch.Tensor,
    dim: int | Sequence[int] | None,
    keepdim: bool,
    out_dtype: torch.dtype | None,
    *,
    average: bool,
) -> torch.Tensor:
    require_float("x", x)
    dims = _dimensions(x, dim)
    if out_dtype is None:
        out_dtype = x.dtype
    else:
        output_dtype_code(out_dtype)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Reduce.apply(x, dims, keepdim, out_dtype, average)
    return _forward(x, dims, keepdim, out_dtype, average)


def _dimensions(x: torch.Tensor, dim: int | Sequence[int] | None) -> tuple[int, ...]:
    """The reduced dimensions, from 0 on, ascending."""
    if dim is None:
        return tuple(range(x.dim()))
    wanted = [dim] if isinstance(dim, int) else list(dim)
    rank = max(x.dim(), 1)
    for item in wanted:
        if not -rank <= item < rank:
            raise InvalidInputError(f"dim {item} does not exist: x has shape {tuple(x.shape)}")
    dims = sorted(item % rank for item in wanted)
    if len(set(dims)) < len(dims):
        raise InvalidInputError(f"dim must name each dimension once, got {tuple(wanted)}")
    return tuple(item for item in dims if x.dim() > 0)


def _forward(
    x: torch.Tensor, dims: tuple[int, ...], keepdim: bool, out_dtype: torch.dtype, average: bool
) -> torch.Tensor:
    kept = [i for i in range(x.dim()) if i not in dims]
    shape = [x.shape[i] for i in kept]
    width = 1
    for i in dims:
        width *= x.shape[i]
    rows = x.permute((*kept, *dims)).contiguous()
    out = x.new_empty(shape, dtype=out_dtype)
    sum_rows(rows.view(out.numel(), width), out, average)
    if keepdim:
        return out.view([1 if i in dims else size for i, size in enumerate(x.shape)])
    return out


def sum_rows(rows: torch.Tensor, out: torch.Tensor, average: bool) -> None:
    """out[r] = the sum, or the average, of rows[r]; both contiguous."""
    if on_triton(rows):
        triton_kernels("reductions").sum_rows(rows, out, average)
        return
    count, width = rows.shape
    _row_sums(
        rows.data_ptr(),
        DTYPE_CODES[rows.dtype],
        out.data_ptr(),
        DTYPE_CODES[out.dtype],
        count,
        width,
        float(width) if average else 1.0,
        thread_count(),
    )


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        dims: tuple[int, ...],
        keepdim: bool,
        out_dtype: torch.dtype,
        average: bool,
    ) -> torch.Tensor:
        ctx.shape, ctx.dtype, ctx.dims, ctx.average = x.shape, x.dtype, dims, average
        return _forward(x, dims, keepdim, out_dtype, average)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        shape = [1 if i in ctx.dims else size for i, size in enumerate(ctx.shape)]
        grad = grad.reshape(shape).float()
        if ctx.average:
            count = 1
            for i in ctx.dims:
                count *= ctx.shape[i]
            grad = grad / count
        return grad.to(ctx.dtype).expand(ctx.shape), None, None, None, None
