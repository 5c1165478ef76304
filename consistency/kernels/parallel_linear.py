"""linear and the LM head's logits with the weight spread over the ranks of a process group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from consistency.kernels import _ranks
from consistency.kernels._arguments import output_dtype_code, require_float, require_shape
from consistency.kernels._autograd import once_differentiable
from consistency.kernels._dispatch import one_device
from consistency.kernels._gemm import chunk_count, multiply
from consistency.kernels.linear import accumulate_or_return, bias_gradient, linear_with_chunks
from consistency.kernels.lm_head import require_head

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@one_device
def column_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: ProcessGroup | None = None,
    out_dtype: torch.dtype | None = None,
    sequence_parallel: bool = False,
    gather_output: bool = False,
) -> torch.Tensor:
    """The rows [rank N / R, (rank + 1) N / R) of the weight: this rank's columns of `linear`.

    Args:
        x: [T, K], the same on all ranks; with `sequence_parallel` [T / R, K], this rank's tokens.
        weight: [N / R, K]; `main_grad` as in `linear`.
        bias: [N / R], or None.
        group: the ranks; by default all of them.
        out_dtype: dtype of the result; by default that of `x`.
        sequence_parallel: gather the tokens first; the gradient of `x` is scattered again.
        gather_output: return all N columns; the gradient that arrives must be the same on all
            ranks.

    Returns:
        [T, N / R], or [T, N] with `gather_output`.

    Raises:
        UnsupportedError: no process group, a number of ranks or an N that the contract's trees are
            not cut for, or a dtype, layout or device that the kernels do not take.
        InvalidInputError: shapes that do not fit.

    Order of reduction:
        That of linear(..., tp_invariant=True). dx is a reduction over N: each rank adds the chunks
        of its columns in fp32, and the tree over ranks is the rest of the whole's.
    """
    _check_linear(x, weight, bias, out_dtype)
    rank, size = _ranks.rank_and_size(group)
    chunks = chunk_count(weight.shape[1], tp_invariant=True)
    parts = _ranks.chunks_per_rank("N", weight.shape[0] * size, size)
    return _ColumnParallel.apply(
        x, weight, bias, out_dtype or x.dtype, chunks, parts, group, rank, size,
        sequence_parallel, gather_output,
    )  # fmt: skip


@one_device
def row_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: ProcessGroup | None = None,
    out_dtype: torch.dtype | None = None,
    sequence_parallel: bool = False,
) -> torch.Tensor:
    """`linear` whose features are spread over the ranks; every rank gets the whole result.

    Args:
        x: [T, K / R], this rank's features.
        weight: [N, K / R], the columns of the whole weight that meet them; `main_grad` as in
            `linear`.
        bias: [N], the same on all ranks, or None; added once, after the reduction.
        group: the ranks; by default all of them.
        out_dtype: dtype of the result; by default that of `x`.
        sequence_parallel: return this rank's tokens only; T must be a multiple of R.

    Returns:
        [T, N], or [T / R, N] with `sequence_parallel`.

    Raises:
        UnsupportedError: no process group, a number of ranks or a K that the contract's trees are
            not cut for, or a dtype, layout or device that the kernels do not take.
        InvalidInputError: shapes that do not fit.

    Order of reduction:
        That of linear(..., tp_invariant=True): fp32 partials of this rank's chunks, the tree over
        ranks, the bias in fp32, one rounding. dx, dweight and dbias need no reduction over ranks;
        with `sequence_parallel` the gradient's tokens are gathered first.
    """
    _check_linear(x, weight, None, out_dtype)
    if bias is not None:
        require_float("bias", bias)
        require_shape("bias", bias, weight.shape[:1], "one per row of weight")
    _, size = _ranks.rank_and_size(group)
    chunks = _ranks.chunks_per_rank("K", weight.shape[1] * size, size)
    return _RowParallel.apply(
        x, weight, bias, out_dtype or x.dtype, chunks, group, size, sequence_parallel
    )


@one_device
def vocabulary_parallel_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    gather_output: bool = True,
) -> torch.Tensor:
    """`lm_head_logits` of the whole vocabulary, [T, V] float32, on every rank.

    Args:
        hidden: [T, K], the same on all ranks; with `sequence_parallel` [T / R, K], this rank's.
        weight: [V / R, K], the rows [rank V / R, (rank + 1) V / R); `main_grad` as in `linear`.
        group: the ranks; by default all of them.
        sequence_parallel: gather the tokens first; the gradient of `hidden` is scattered again.
        gather_output: False returns this rank's columns, [T, V / R].

    Raises:
        UnsupportedError, InvalidInputError: as in `column_parallel_linear`.

    Order of reduction:
        That of `lm_head_logits`, forward and backward.
    """
    require_head(hidden, weight)
    rank, size = _ranks.rank_and_size(group)
    parts = _ranks.chunks_per_rank("V", weight.shape[0] * size, size)
    return _ColumnParallel.apply(
        hidden, weight, None, torch.float32, 1, parts, group, rank, size,
        sequence_parallel, gather_output,
    )  # fmt: skip


def _check_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> None:
    require_float("x", x, 2)
    require_float("weight", weight, 2)
    require_shape("x", x, (x.shape[0], weight.shape[1]), "tokens, the columns of weight")
    if bias is not None:
        require_float("bias", bias)
        require_shape("bias", bias, weight.shape[:1], "one per row of weight")
    if out_dtype is not None:
        output_dtype_code(out_dtype)


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        chunks: int,
        parts: int,
        group: ProcessGroup | None,
        rank: int,
        size: int,
        sequence_parallel: bool,
        gather_output: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        # Saved tensors may come back as other objects; main_grad is an attribute of these.
        ctx.weight, ctx.bias, ctx.parts = weight, bias, parts
        ctx.group, ctx.rank, ctx.size = group, rank, size
        ctx.sequence_parallel, ctx.gather_output = sequence_parallel, gather_output
        if sequence_parallel:
            x = _ranks.all_gather(x, group, size)
        out = linear_with_chunks(x, weight, bias, out_dtype, chunks=chunks, tp_invariant=True)
        if gather_output and size > 1:
            columns = _ranks.all_gather(out.unsqueeze(0), group, size)
            out = columns.transpose(0, 1).reshape(out.shape[0], -1)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        if ctx.gather_output:
            columns = weight.shape[0]
            grad = grad[:, ctx.rank * columns : (ctx.rank + 1) * columns]
        rows = _ranks.all_gather(x, ctx.group, ctx.size) if ctx.sequence_parallel else x
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            partial = rows.new_empty(rows.shape, dtype=torch.float32)
            multiply(grad, weight, partial, chunks=ctx.parts)
            join = _ranks.reduce_scatter if ctx.sequence_parallel else _ranks.all_reduce
            grad_x = join(partial, ctx.group, ctx.size).to(x.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = accumulate_or_return(ctx.weight, grad.t(), rows)
        if ctx.needs_input_grad[2]:
            grad_bias = bias_gradient(ctx.bias, grad)
        return (grad_x, grad_weight, grad_bias, *(None,) * 8)


class _RowParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        chunks: int,
        group: ProcessGroup | None,
        size: int,
        sequence_parallel: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.bias, ctx.group, ctx.size = weight, bias, group, size
        ctx.sequence_parallel = sequence_parallel
        partial = linear_with_chunks(
            x, weight, None, torch.float32, chunks=chunks, tp_invariant=True
        )
        join = _ranks.reduce_scatter if sequence_parallel else _ranks.all_reduce
        total = join(partial, group, size)
        if bias is not None:
            total = total + bias.float()
        return total.to(out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        if ctx.sequence_parallel:
            grad = _ranks.all_gather(grad, ctx.group, ctx.size)
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            chunks = chunk_count(weight.shape[0], tp_invariant=True)
            grad_x = multiply(grad, weight, x.new_empty(x.shape), chunks=chunks)
        if ctx.needs_input_grad[1]:
            grad_weight = accumulate_or_return(ctx.weight, grad.t(), x)
        if ctx.needs_input_grad[2]:
            grad_bias = bias_gradient(ctx.bias, grad)
        return grad_x, grad_weight, grad_bias, None, None, None, None, None
