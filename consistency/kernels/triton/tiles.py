"""Which tile a matrix product runs with: a function of the target, the dtype, N, K and M's class.

Nothing is tuned by timing: two processes that hold the same contract pick the same tile. The tiles
of one target and dtype form a class whose members give equal bits: each element of the result is a
chain over k in steps of one matrix instruction, whatever the tile around it. `tile_class` lists the
members so that a test on the device can verify them (`python -m bench.gpu`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from consistency.kernels.triton.launch import Target


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows, columns and steps in k of a tile; warps and pipeline stages of its program."""

    rows: int
    columns: int
    steps: int
    warps: int
    stages: int


# Rows up to which the chunks of K run in parallel: the product is then bound by memory.
SPLIT_ROWS = 64

# Up to four accumulators are alive in the chunk tree, so a tile shrinks with the chunks.
_WIDE = {1: Tile(128, 256, 64, 8, 3), 2: Tile(128, 128, 64, 8, 4)}
_WIDE |= {4: Tile(128, 64, 64, 8, 4), 8: Tile(128, 64, 32, 8, 4)}
_AMPERE = {1: Tile(128, 128, 64, 8, 3), 2: Tile(128, 64, 64, 8, 3)}
_HIP = {1: Tile(128, 128, 64, 8, 2), 2: Tile(128, 64, 64, 8, 2)}


def tile_for(
    target: Target, dtype: torch.dtype, m: int, chunks: int, *, plain: bool = True
) -> Tile:
    """The tile for a product of `m` rows whose K is cut into `chunks` that run in sequence.

    Args:
        dtype: that of both operands; float32 if they differ.
        plain: both operands are contiguous along k and m counts one matrix; other products keep
            more addresses in registers and get a smaller tile where many accumulators are alive.
    """
    if target.interpreted:
        return Tile(16 if m <= 16 else 32, 64, 64, 4, 1)
    if dtype == torch.float32:
        # True fp32 runs on the ordinary units, an outer product per step.
        return Tile(16, 64, 16, 4, 2) if m <= 16 else Tile(32, 64, 16, 8, 3)
    depth = 4 if target.backend == "cuda" else 2
    wide = target.matrix_rows == 64
    if chunks > 2 and not (plain and (wide or m <= SPLIT_ROWS)):
        return Tile(64, 64, 32, 8, depth)
    if m <= 16 and not wide:
        return Tile(16, 64, 64, 4, depth)
    if m <= 64:
        return Tile(64, 64, 64, 4, depth)
    if m <= 256:
        return Tile(64, 64 if chunks > 2 else 128, 64, 4 if chunks == 1 else 8, min(depth, 3))
    if not plain:
        return Tile(128, 128 if chunks == 1 else 64, 64 if wide else 32, 8, min(depth, 3))
    table = _HIP if target.backend == "hip" else _WIDE if wide else _AMPERE
    return table[min(chunks, 8)]


def tile_class(target: Target, dtype: torch.dtype) -> tuple[Tile, ...]:
    """Every tile that `tile_for` can return: the class whose bits must be equal."""
    found = {
        tile_for(target, dtype, m, chunks, plain=plain)
        for m in (1, 17, 65, 257)
        for chunks in (1, 2, 4, 8)
        for plain in (True, False)
    }
    return tuple(sorted(found, key=lambda tile: (tile.rows, tile.columns, tile.steps, tile.warps)))
