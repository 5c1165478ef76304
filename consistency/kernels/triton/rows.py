# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false
# The body of a kernel is written in Triton's language, whose types are not those of Python.
"""What the row operations share: how a row is cut into lanes, and sums over rows.

Order of reduction:
    A row of width W folds into L lanes by index modulo L, in order, where L is the smaller of 1024
    and the power of two that covers W; the lanes join by the tree of `tl.sum`, which the lanes and
    the warps decide. Both are functions of W alone, and a program holds one row, so nothing else
    enters. A sum over R rows joins 32 neighbours in order, level by level: a function of R alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistency.kernels.triton.launch import blocks_of, launch, power_of_two

_MOST_LANES = 1024
ROWS_PER_SUM = 32
COLUMNS_PER_SUM = 128


def lanes_of(width: int) -> int:
    """The lanes that a row of this width folds into."""
    return min(_MOST_LANES, power_of_two(width))


def warps_of(width: int) -> int:
    """The warps of a program that holds a row of this width."""
    return max(1, min(8, lanes_of(width) // 128))


@triton.jit
def exponential(x):
    """exp(x) by the target's fast exponential of base 2; the same instruction in every kernel."""
    return tl.exp(x)


@triton.jit(do_not_specialize=["rows"])
def _fold_rows(x, out, rows, width, SPAN: tl.constexpr, COLUMNS: tl.constexpr):
    column_blocks = tl.cdiv(width, COLUMNS)
    place = tl.program_id(0)
    block = (place // column_blocks).to(tl.int64)
    columns = place % column_blocks * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for row in range(block * SPAN, tl.minimum(rows, (block + 1) * SPAN)):
        total += tl.load(x + row * width + columns, mask=inside, other=0.0)
    tl.store(out + block * width + columns, total, mask=inside)


def sum_over_rows(x: torch.Tensor) -> torch.Tensor:
    """The sum of a contiguous fp32 [R, W] over R: fp32 [W]; see this module for the order."""
    rows, width = x.shape
    if rows == 0:
        return x.new_zeros(width)
    while rows > 1:
        blocks = blocks_of(rows, ROWS_PER_SUM)
        folded = x.new_empty((blocks, width))
        launch(
            _fold_rows,
            blocks * blocks_of(width, COLUMNS_PER_SUM),
            x,
            folded,
            *(rows, width),
            on=x,
            SPAN=ROWS_PER_SUM,
            COLUMNS=COLUMNS_PER_SUM,
        )
        x, rows = folded, blocks
    return x.reshape(width)
