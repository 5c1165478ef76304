"""grouped_linear: one `linear` per expert, for rows sorted by expert."""

from __future__ import annotations

from typing import Any

import torch

from consistency.errors import InvalidInputError
from consistency.kernels._arguments import (
    main_gradient,
    output_dtype_code,
    require_float,
    require_integer,
    require_shape,
)
from consistency.kernels._autograd import once_differentiable
from consistency.kernels._dispatch import one_device, values_readable
from consistency.kernels._gemm import (
    ACCUMULATE,
    chunk_count,
    multiply_grouped_rows,
    multiply_grouped_steps,
)


@one_device
def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    tp_invariant: bool = False,
) -> torch.Tensor:
    """y[t, n] = sum over k of x[t, k] weight[e, n, k] for offsets[e] <= t < offsets[e + 1].

    Args:
        x: [T, K], float32, bfloat16 or float16, rows sorted by expert.
        weight: [E, N, K], one of the same dtypes. With an attribute `main_grad` (float32,
            [E, N, K]) its gradient is added there and autograd receives None.
        offsets: int64 [E + 1], from 0 to T, never falling; an expert may have no rows.
        out_dtype: dtype of the result; by default that of `x`.
        tp_invariant: cut K into chunks, as in `linear`.

    Returns:
        [T, N] in `out_dtype`.

    Raises:
        UnsupportedError: a dtype, layout or device that the kernels do not take.
        InvalidInputError: shapes that do not fit, or offsets that do not cut [0, T) into E parts.

    Order of reduction:
        That of `linear`: the rows of one expert are linear(rows, weight[e]) bit for bit, whatever
        the other experts receive. dweight[e] reduces over the rows of e in order; an expert without
        rows leaves its `main_grad` untouched.
    """
    require_float("x", x, 2)
    require_float("weight", weight, 3)
    if x.shape[1] != weight.shape[2]:
        raise InvalidInputError(
            f"the last dimension of x must be {weight.shape[2]} (weight is {tuple(weight.shape)}), "
            f"got x {tuple(x.shape)}"
        )
    require_offsets(offsets, weight.shape[0], x.shape[0])
    if out_dtype is None:
        out_dtype = x.dtype
    else:
        output_dtype_code(out_dtype)
    offsets = offsets.contiguous()
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _GroupedLinear.apply(x, weight, offsets, out_dtype, tp_invariant)
    return _forward(x, weight, offsets, out_dtype, tp_invariant)


def require_offsets(offsets: torch.Tensor, groups: int, rows: int) -> None:
    """Raises unless `offsets` cuts [0, rows) into `groups` consecutive parts."""
    require_integer("offsets", offsets, 1)
    require_shape("offsets", offsets, (groups + 1,), "one more than the experts")
    if not values_readable(offsets):
        return
    bounds = offsets.tolist()
    if bounds[0] != 0 or bounds[-1] != rows:
        raise InvalidInputError(
            f"offsets must run from 0 to the {rows} rows of x, got {bounds[0]} to {bounds[-1]}"
        )
    for expert in range(groups):
        if bounds[expert] > bounds[expert + 1]:
            raise InvalidInputError(
                f"offsets must never fall, got {bounds[expert]} then {bounds[expert + 1]} "
                f"at expert {expert}"
            )


def _forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    out_dtype: torch.dtype,
    tp_invariant: bool,
) -> torch.Tensor:
    out = torch.empty((x.shape[0], weight.shape[1]), dtype=out_dtype, device=x.device)
    chunks = chunk_count(weight.shape[2], tp_invariant)
    return multiply_grouped_rows(x, offsets, weight.transpose(1, 2), out, chunks=chunks)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        offsets: torch.Tensor,
        out_dtype: torch.dtype,
        tp_invariant: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, offsets)
        # Saved tensors may come back as other objects; main_grad is an attribute of this one.
        ctx.weight, ctx.tp_invariant = weight, tp_invariant
        return _forward(x, weight, offsets, out_dtype, tp_invariant)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, offsets = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            chunks = chunk_count(weight.shape[1], ctx.tp_invariant)
            multiply_grouped_rows(grad, offsets, weight, grad_x, chunks=chunks)
        if ctx.needs_input_grad[1]:
            grad_weight = grouped_weight_gradient(ctx.weight, grad, x, offsets)
        return grad_x, grad_weight, None, None, None


def grouped_weight_gradient(
    weight: torch.Tensor, grad: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor
) -> Any:
    """grad[rows of e]^T x[rows of e] for every expert: added to `weight.main_grad`, or returned."""
    buffer = main_gradient(weight)
    if buffer is not None:
        multiply_grouped_steps(grad.t(), offsets, x, buffer, mode=ACCUMULATE)
        return None
    return multiply_grouped_steps(grad.t(), offsets, x, weight.new_empty(weight.shape))
