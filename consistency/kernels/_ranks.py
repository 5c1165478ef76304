"""Sums over the ranks of a process group in one fixed tree, and the moves of data between them.

Order of reduction: an element of the result is the tree of neighbours, pairwise and level by level
in fp32, over the ranks' values in rank order. How the data travels does not enter: every backend
and every algorithm of it gives the same bits, because only copies are asked of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import distributed

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.kernels._gemm import chunk_count

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def rank_and_size(group: ProcessGroup | None) -> tuple[int, int]:
    """This process's rank in the group and the group's size.

    Raises:
        UnsupportedError: torch.distributed is not initialised, or the size is not a power of two.
    """
    if not distributed.is_available() or not distributed.is_initialized():
        raise UnsupportedError(
            "no process group exists: call torch.distributed.init_process_group first"
        )
    rank, size = distributed.get_rank(group), distributed.get_world_size(group)
    if rank < 0:
        raise InvalidInputError("this process is not a member of the group that it was given")
    if size & (size - 1):
        raise UnsupportedError(
            f"the group has {size} ranks: the trees of the contract are cut for 1, 2, 4 or 8"
        )
    return rank, size


def chunks_per_rank(name: str, reduction: int, size: int) -> int:
    """The chunks of a reduction of this (whole) length that fall to each of `size` ranks.

    Raises:
        UnsupportedError: the contract cuts the reduction into fewer chunks than there are ranks.
    """
    chunks = chunk_count(reduction, tp_invariant=True)
    if chunks % size:
        raise UnsupportedError(
            f"{name} is {reduction}, which the contract cuts into {chunks} chunk(s), not enough "
            f"for {size} ranks: use a multiple of {64 * size}, or fewer ranks"
        )
    return chunks // size


def tree_sum(values: torch.Tensor) -> torch.Tensor:
    """values [R, ...] float32, R a power of two, added as neighbours, level by level."""
    level = list(values.unbind())
    while len(level) > 1:
        level = [level[i] + level[i + 1] for i in range(0, len(level), 2)]
    return level[0]


def reduce_scatter(partial: torch.Tensor, group: ProcessGroup | None, size: int) -> torch.Tensor:
    """This rank's rows of the tree over all ranks' `partial` [rows, ...] float32."""
    if size == 1:
        return partial
    if partial.shape[0] % size:
        raise InvalidInputError(
            f"{partial.shape[0]} rows cannot be scattered over {size} ranks: pad them to a multiple"
        )
    received = torch.empty_like(partial, memory_format=torch.contiguous_format)
    distributed.all_to_all_single(received, partial.contiguous(), group=group)
    return tree_sum(received.view(size, partial.shape[0] // size, *partial.shape[1:]))


def all_gather(rows: torch.Tensor, group: ProcessGroup | None, size: int) -> torch.Tensor:
    """The rows [n, ...] of all ranks, in rank order: [R n, ...]."""
    if size == 1:
        return rows
    whole = rows.new_empty((size, *rows.shape))
    distributed.all_gather(list(whole.unbind()), rows.contiguous(), group=group)
    return whole.flatten(0, 1)


def all_reduce(partial: torch.Tensor, group: ProcessGroup | None, size: int) -> torch.Tensor:
    """The tree over all ranks' `partial` float32, on every rank: each rank adds one slice."""
    if size == 1:
        return partial
    count = partial.numel()
    flat = partial.reshape(-1)
    slack = -count % size
    if slack:
        flat = torch.cat([flat, flat.new_zeros(slack)])
    whole = all_gather(reduce_scatter(flat, group, size), group, size)
    return whole[:count].view(partial.shape)
