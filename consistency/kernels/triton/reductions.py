# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false
# The body of a kernel is written in Triton's language, whose types are not those of Python.
"""sum and mean on a GPU; the public functions are in `consistency.kernels.reductions`.

Order of reduction:
    A row folds as `rows` states, one program per row; a mean divides in fp32 before the rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistency.kernels.triton.launch import launch
from consistency.kernels.triton.rows import lanes_of, warps_of
from consistency.kernels.triton.tile import rounded


@triton.jit
def _sum_row(x, out, width, divisor, LANES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    sums = tl.zeros((LANES,), dtype=tl.float32)
    for start in range(0, width, LANES):
        columns = start + lanes
        value = tl.load(x + row * width + columns, mask=columns < width, other=0.0)
        sums += value.to(tl.float32)
    total = tl.div_rn(tl.sum(sums, 0), divisor)
    tl.store(out + row, rounded(total, out.dtype.element_ty))


def sum_rows(rows: torch.Tensor, out: torch.Tensor, average: bool) -> None:
    """out[r] = the sum, or the average, of rows[r]; both contiguous."""
    count, width = rows.shape
    launch(
        _sum_row,
        count,
        rows,
        out,
        width,
        float(width) if average else 1.0,
        on=rows,
        warps=warps_of(width),
        LANES=lanes_of(width),
    )
