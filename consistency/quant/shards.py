"""Blocks under tensor parallelism: a block belongs to one rank, or the scales change.

A rank that quantises its own slice of the contraction axis sees other maxima than the whole tensor
would give if a block crosses the boundary (K = 2880 over four ranks: 4 % of the values differ).
"""

from __future__ import annotations

from dataclasses import dataclass

from consistency.errors import InvalidInputError
from consistency.quant.formats import BLOCK


@dataclass(frozen=True, slots=True)
class BlockShard:
    """One rank's slice of a contraction axis.

    Args:
        start, stop: elements of the axis that the rank holds; both multiples of 32.
        padding: zeros after them, a multiple of 32, so that all ranks have equal extents.
    """

    start: int
    stop: int
    padding: int

    @property
    def extent(self) -> int:
        """Elements in the rank's tensor, padding included."""
        return self.stop - self.start + self.padding


def shard_blocks(width: int, ranks: int, *, pad: bool = False) -> tuple[BlockShard, ...]:
    """Cuts a contraction axis into one slice of whole blocks per rank.

    Args:
        width: length of the axis, a multiple of 32.
        ranks: tensor-parallel degree, at least 1.
        pad: give the last ranks blocks of zeros where the blocks do not divide evenly.

    Returns:
        The slices in rank order, all of one extent.

    Raises:
        InvalidInputError: `width` is no multiple of 32, `ranks` is below 1, or an even cut would
            cross a block and `pad` is off.
    """
    if ranks < 1:
        raise InvalidInputError(f"ranks is {ranks}: use the tensor-parallel degree, at least 1")
    if width < 0 or width % BLOCK:
        raise InvalidInputError(
            f"a contraction axis of {width} has no whole blocks: it must be a multiple of {BLOCK}"
        )
    blocks = width // BLOCK
    if blocks % ranks and not pad:
        raise InvalidInputError(
            f"a contraction axis of {width} over {ranks} ranks gives {width / ranks:g} elements "
            f"per rank, which cuts a block of {BLOCK}: use a degree that divides {blocks} blocks, "
            "or pad=True"
        )
    extent = -(-blocks // ranks) * BLOCK
    shards = []
    for rank in range(ranks):
        start, stop = min(rank * extent, width), min((rank + 1) * extent, width)
        shards.append(BlockShard(start, stop, extent - (stop - start)))
    return tuple(shards)
