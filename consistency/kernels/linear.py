"""linear: x W^T + b, the same bits for a row whatever else is in the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from consistency.errors import InvalidInputError
from consistency.kernels._arguments import (
    main_gradient,
    output_dtype_code,
    require_float,
    require_shape,
)
from consistency.kernels._autograd import once_differentiable
from consistency.kernels._dispatch import one_device
from consistency.kernels._gemm import (
    ACCUMULATE,
    chunk_count,
    multiply,
    multiply_weight,
    require_chunks,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


@one_device
def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    tp_invariant: bool = False,
) -> torch.Tensor:
    """y[..., n] = sum over k of x[..., k] weight[n, k] + bias[n].

    Args:
        x: [..., K], float32, bfloat16 or float16, any strides.
        weight: [N, K], one of the same dtypes; it need not be the dtype of `x`. With an attribute
            `main_grad` (float32, [N, K]) its gradient is added there and autograd receives None.
        bias: [N], or None.
        out_dtype: dtype of the result; by default that of `x`.
        tp_invariant: cut K into chunks so that row-parallel ranks can compute subtrees
            (`row_parallel_partial`) and agree with the whole bit for bit.

    Returns:
        [..., N] in `out_dtype`.

    Raises:
        UnsupportedError: a dtype, layout or device that the kernels do not take.
        InvalidInputError: shapes that do not fit.

    Order of reduction:
        K is cut into C chunks, a function of K and `tp_invariant` alone; a chunk into blocks of 256
        steps, a block into chains of 64 fused multiply-adds in k. Chains and blocks are added in
        order, chunks by a binary tree of neighbours; then the bias, all in fp32, and one rounding.
        The short chains halve the error of one long chain. A row of the result therefore depends on
        that row of `x` alone, and a column on that row of `weight` alone. In the backward, dx
        reduces over N by the same rule, dweight and dbias over the rows in order, in one chunk.
    """
    require_float("x", x)
    require_float("weight", weight, 2)
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise InvalidInputError(
            f"the last dimension of x must be {weight.shape[1]} (weight is {tuple(weight.shape)}), "
            f"got x {tuple(x.shape)}"
        )
    if bias is not None:
        require_float("bias", bias)
        require_shape("bias", bias, weight.shape[:1], "one per row of weight")
    if out_dtype is None:
        out_dtype = x.dtype
    else:
        output_dtype_code(out_dtype)
    chunks = chunk_count(weight.shape[1], tp_invariant)
    return linear_with_chunks(x, weight, bias, out_dtype, chunks=chunks, tp_invariant=tp_invariant)


@one_device
def row_parallel_partial(
    x: torch.Tensor, weight: torch.Tensor, *, chunks: int, tp_invariant: bool = True
) -> torch.Tensor:
    """One rank's unrounded share of a row-parallel `linear`: x weight^T in fp32.

    Args:
        x: [..., K / R], this rank's share of the features.
        weight: [N, K / R], this rank's share of the columns.
        chunks: the chunks that fall to this rank: those of the whole K divided by the ranks R.
        tp_invariant: the rule by which the backward cuts its own reduction over N.

    Returns:
        [..., N] float32, to be gathered from all ranks and given to `join_partials` in rank order.

    Raises:
        InvalidInputError: shapes that do not fit, or a number of chunks that is not a power of two
            or does not divide the length of the reduction.

    Order of reduction:
        That of `linear` over this rank's chunks: a subtree of the whole.
    """
    require_float("x", x)
    require_float("weight", weight, 2)
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise InvalidInputError(
            f"the last dimension of x must be {weight.shape[1]} (weight is {tuple(weight.shape)}), "
            f"got x {tuple(x.shape)}"
        )
    require_chunks(chunks, weight.shape[1])
    return linear_with_chunks(
        x, weight, None, torch.float32, chunks=chunks, tp_invariant=tp_invariant
    )


@one_device
def join_partials(
    partials: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Finishes the tree that row-parallel ranks began: the bits of the `linear` of the whole.

    Args:
        partials: the results of `row_parallel_partial` in rank order; a power of two of them, all
            float32 and of one shape [..., N].
        bias: [N], or None.
        out_dtype: dtype of the result.

    Returns:
        [..., N] in `out_dtype`.

    Raises:
        InvalidInputError: the number of partials is not a power of two, or they do not fit.

    Order of reduction:
        Neighbours pairwise, level by level, in fp32; then the bias; then one rounding.
    """
    count = len(partials)
    if count < 1 or count & (count - 1):
        raise InvalidInputError(f"the number of partials must be a power of two, got {count}")
    for rank, partial in enumerate(partials):
        require_float(f"partials[{rank}]", partial)
        require_shape(f"partials[{rank}]", partial, partials[0].shape, "that of partials[0]")
        if partial.dtype != torch.float32:
            raise InvalidInputError(f"partials[{rank}] must be float32, got {partial.dtype}")
    output_dtype_code(out_dtype)
    level = list(partials)
    while len(level) > 1:
        level = [level[i] + level[i + 1] for i in range(0, len(level), 2)]
    total = level[0] if bias is None else level[0] + bias.float()
    return total.to(out_dtype)


def accumulate_or_return(weight: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> Any:
    """The gradient left @ right of `weight`: added to `weight.main_grad`, or returned."""
    buffer = main_gradient(weight)
    if buffer is not None:
        multiply(left, right, buffer, mode=ACCUMULATE)
        return None
    return multiply(left, right, weight.new_empty(weight.shape))


def linear_with_chunks(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    *,
    chunks: int,
    tp_invariant: bool,
) -> torch.Tensor:
    """`linear` of checked arguments; `tp_invariant` governs the backward's reduction over N."""
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return _Linear.apply(x, weight, bias, out_dtype, chunks, tp_invariant)
    return _forward(x, weight, bias, out_dtype, chunks)


def _forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    chunks: int,
) -> torch.Tensor:
    rows = x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])
    out = torch.empty((rows.shape[0], weight.shape[0]), dtype=out_dtype, device=x.device)
    if bias is not None and not bias.is_contiguous():
        bias = bias.contiguous()
    multiply_weight(rows, weight, out, bias=bias, chunks=chunks)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], weight.shape[0])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        chunks: int,
        tp_invariant: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        # Saved tensors may come back as other objects; main_grad is an attribute of these.
        ctx.weight, ctx.bias, ctx.tp_invariant = weight, bias, tp_invariant
        return _forward(x, weight, bias, out_dtype, chunks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad_rows = grad.reshape(x.shape[:-1].numel(), weight.shape[0])
        rows = x.reshape(grad_rows.shape[0], weight.shape[1])
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
            chunks = chunk_count(weight.shape[0], ctx.tp_invariant)
            grad_x = multiply(grad_rows, weight, grad_x, chunks=chunks).view(x.shape)
        if ctx.needs_input_grad[1]:
            grad_weight = accumulate_or_return(ctx.weight, grad_rows.t(), rows)
        if ctx.needs_input_grad[2]:
            grad_bias = bias_gradient(ctx.bias, grad_rows)
        return grad_x, grad_weight, grad_bias, None, None, None


def bias_gradient(bias: torch.Tensor, grad_rows: torch.Tensor) -> Any:
    """The column sums of grad_rows [T, N]: added to `bias.main_grad`, or returned."""
    one = torch.ones(1, dtype=torch.float32, device=grad_rows.device)
    ones = one.expand(1, grad_rows.shape[0])
    buffer = main_gradient(bias)
    if buffer is not None:
        multiply(ones, grad_rows, buffer.unsqueeze(0), mode=ACCUMULATE)
        return None
    return multiply(ones, grad_rows, bias.new_empty((1, *bias.shape))).squeeze(0)
