# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false
# The body of a kernel is written in Triton's language, whose types are not those of Python.
"""The gradient of an embedding table on a GPU; see `consistency.kernels.embedding`.

Order of reduction:
    One program per row of the table that occurs and block of columns: the gradients of its
    occurrences are added in order of position, in fp32. No atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistency.kernels.triton.launch import blocks_of, launch
from consistency.kernels.triton.tile import rounded

_COLUMNS = 256


@triton.jit(do_not_specialize=["count"])
def _add_occurrences(
    ordered,
    positions,
    rows,
    out,
    count,
    width,
    out_row,
    ACCUMULATE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column_blocks = tl.cdiv(width, COLUMNS)
    place = (tl.program_id(0) // column_blocks).to(tl.int64)
    columns = tl.program_id(0) % column_blocks * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    id = tl.load(ordered + place)
    before = tl.load(ordered + tl.maximum(place - 1, 0))
    if (place == 0) | (before != id):
        total = tl.zeros((COLUMNS,), dtype=tl.float32)
        current = id
        while current == id:
            row = tl.load(positions + place)
            value = tl.load(rows + row * width + columns, mask=inside, other=0.0)
            total += value.to(tl.float32)
            place += 1
            current = tl.load(ordered + place, mask=place < count, other=-1)
        target = out + id * out_row + columns
        if ACCUMULATE:
            total = tl.load(target, mask=inside, other=0.0).to(tl.float32) + total
        tl.store(target, rounded(total, out.dtype.element_ty), mask=inside)


def add_occurrences(
    ordered: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    out: torch.Tensor,
    *,
    accumulate: bool,
) -> None:
    """out[id] = (or +=) the sum of rows[positions] where ordered is id, for each id in `ordered`.

    Args:
        ordered: int64 [T], ids in ascending order.
        positions: int64 [T], the row of each, ascending among equal ids.
        rows: [T, H] contiguous.
        out: [V, H], contiguous in H.
    """
    count, width = rows.shape
    launch(
        _add_occurrences,
        count * blocks_of(width, _COLUMNS),
        ordered,
        positions,
        rows,
        out,
        *(count, width, out.stride(0)),
        on=out,
        ACCUMULATE=accumulate,
        COLUMNS=_COLUMNS,
    )
