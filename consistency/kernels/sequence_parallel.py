"""Sums, scatters and gathers over ranks, with gradients: the seams of sequence parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.kernels import _ranks
from consistency.kernels._arguments import output_dtype_code, require_float
from consistency.kernels._autograd import once_differentiable

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# dweight of a norm adds its rows in blocks of this many, and the blocks by a binary tree.
_NORM_ROWS_PER_BLOCK = 8


def tree_all_reduce(
    partial: torch.Tensor,
    *,
    group: ProcessGroup | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The sum of all ranks' `partial` (float32, any shape), on every rank, rounded once.

    The gradient passes through: it must be the same on all ranks.

    Raises:
        UnsupportedError: no process group, a number of ranks that is not a power of two, or a
            dtype other than float32.

    Order of reduction:
        Neighbours pairwise in rank order, level by level, in fp32: `join_partials` over ranks.
    """
    _require_partial(partial)
    output_dtype_code(out_dtype)
    _, size = _ranks.rank_and_size(group)
    return _AllReduce.apply(partial, out_dtype, group, size)


def tree_reduce_scatter(
    partial: torch.Tensor,
    *,
    group: ProcessGroup | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """This rank's rows [T / R, ...] of the sum of all ranks' `partial` [T, ...] float32.

    The backward gathers the gradient's rows from all ranks.

    Raises:
        UnsupportedError: as in `tree_all_reduce`.
        InvalidInputError: T is not a multiple of the number of ranks.

    Order of reduction:
        That of `tree_all_reduce`.
    """
    _require_partial(partial)
    output_dtype_code(out_dtype)
    _, size = _ranks.rank_and_size(group)
    return _ReduceScatter.apply(partial, out_dtype, group, size)


def scatter_sequence(x: torch.Tensor, *, group: ProcessGroup | None = None) -> torch.Tensor:
    """This rank's tokens [T / R, ...] of `x` [T, ...], which is the same on all ranks.

    The backward gathers the gradient, so that every rank has the whole's.

    Raises:
        UnsupportedError: no process group, or a number of ranks that is not a power of two.
        InvalidInputError: T is not a multiple of the number of ranks.
    """
    rank, size = _ranks.rank_and_size(group)
    if x.dim() == 0 or x.shape[0] % size:
        raise InvalidInputError(
            f"x {tuple(x.shape)} cannot be scattered over {size} ranks: pad its rows to a multiple"
        )
    return _Scatter.apply(x, group, rank, size)


def gather_sequence(x: torch.Tensor, *, group: ProcessGroup | None = None) -> torch.Tensor:
    """The tokens [T, ...] of all ranks, in rank order, from this rank's [T / R, ...].

    What follows must be the same computation on all ranks: the backward takes this rank's slice of
    the gradient. `column_parallel_linear(sequence_parallel=True)` is for what differs by rank.

    Raises:
        UnsupportedError: no process group, or a number of ranks that is not a power of two.
    """
    rank, size = _ranks.rank_and_size(group)
    return _Gather.apply(x, group, rank, size)


def shared_weight(
    weight: torch.Tensor, rows: int, *, group: ProcessGroup | None = None
) -> torch.Tensor:
    """A norm's weight in a sequence-parallel region: float32, its gradient summed over ranks.

    Args:
        weight: [W], the same on all ranks; it must not have `main_grad`, which would be filled
            before the ranks are summed.
        rows: the rows of `x` on each rank, T / R.
        group: the ranks; by default all of them.

    Returns:
        `weight` in float32, for rms_norm(x, shared_weight(weight, len(x)), eps): the norm's bits
        are those of the weight itself, since widening is exact.

    Raises:
        UnsupportedError: no process group, a number of ranks that is not a power of two, or rows
            that are not 8 times a power of two on more than one rank: the rows' tree would be cut
            elsewhere.
        InvalidInputError: the weight has `main_grad`.

    Order of reduction:
        That of the norm's dweight over all T rows: this rank's rows are a subtree.
    """
    require_float("weight", weight, 1)
    if getattr(weight, "main_grad", None) is not None:
        raise InvalidInputError("weight.main_grad must be absent in a sequence-parallel region")
    _, size = _ranks.rank_and_size(group)
    blocks = rows // _NORM_ROWS_PER_BLOCK
    whole = blocks > 0 and rows % _NORM_ROWS_PER_BLOCK == 0 and blocks & (blocks - 1) == 0
    if size > 1 and not whole:
        raise UnsupportedError(
            f"rows is {rows}: with {size} ranks the gradient of a norm's weight keeps its tree for "
            "8, 16, 32, ... rows per rank only; pad the tokens"
        )
    return _SharedWeight.apply(weight, group, size)


def _require_partial(partial: torch.Tensor) -> None:
    require_float("partial", partial)
    if partial.dtype != torch.float32:
        raise UnsupportedError(f"partial must be float32, got {partial.dtype}: round after the sum")


def _rows_of_rank(tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    rows = tensor.shape[0] // size
    return tensor[rank * rows : (rank + 1) * rows]


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dtype: torch.dtype, group: ProcessGroup | None, size: int
    ) -> torch.Tensor:
        total = _ranks.all_reduce(x, group, size)
        return total.to(dtype) if size > 1 or dtype != x.dtype else x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.float(), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dtype: torch.dtype, group: ProcessGroup | None, size: int
    ) -> torch.Tensor:
        ctx.group, ctx.size = group, size
        total = _ranks.reduce_scatter(x, group, size)
        return total.to(dtype) if size > 1 or dtype != x.dtype else x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _ranks.all_gather(grad.float(), ctx.group, ctx.size), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: ProcessGroup | None, rank: int, size: int
    ) -> torch.Tensor:
        ctx.group, ctx.size = group, size
        return _rows_of_rank(x, rank, size).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _ranks.all_gather(grad, ctx.group, ctx.size), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: ProcessGroup | None, rank: int, size: int
    ) -> torch.Tensor:
        ctx.rank, ctx.size = rank, size
        return _ranks.all_gather(x, group, size) if size > 1 else x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _rows_of_rank(grad, ctx.rank, ctx.size), None, None, None


class _SharedWeight(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, group: ProcessGroup | None, size: int
    ) -> torch.Tensor:
        ctx.dtype, ctx.group, ctx.size = weight.dtype, group, size
        return weight.to(torch.float32, copy=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _ranks.all_reduce(grad, ctx.group, ctx.size).to(ctx.dtype), None, None
