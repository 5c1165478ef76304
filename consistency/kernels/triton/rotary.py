# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false
# The body of a kernel is written in Triton's language, whose types are not those of Python.
"""rotary on a GPU; the public function is in `consistency.kernels.rotary`.

Order of reduction:
    None: two products, each rounded in fp32, and their sum; one rounding at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistency.kernels.triton.launch import launch, power_of_two
from consistency.kernels.triton.tile import rounded


@triton.jit(do_not_specialize=["heads"])
def _rotate_head(
    x,
    positions,
    table,
    out,
    token_stride,
    head_stride,
    table_rows,
    heads,
    half,
    INVERSE: tl.constexpr,
    LANES: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    token = place // heads
    head = place % heads
    lanes = tl.arange(0, LANES)
    position = tl.load(positions + token)
    inside = lanes < half
    # A position outside the table, which only a captured graph can bring here, gives NaN.
    known = lanes < tl.where((position >= 0) & (position < table_rows), half, 0)
    source = x + token * token_stride + head * head_stride + lanes
    a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    cosine = tl.load(table + position * 2 * half + lanes, mask=known, other=float("nan"))
    sine = tl.load(table + position * 2 * half + half + lanes, mask=known, other=float("nan"))
    if INVERSE:
        sine = -sine
    target = out + place * 2 * half + lanes
    tl.store(target, rounded(a * cosine - b * sine, out.dtype.element_ty), mask=inside)
    tl.store(target + half, rounded(b * cosine + a * sine, out.dtype.element_ty), mask=inside)


def rotate(
    x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, *, inverse: bool
) -> torch.Tensor:
    """x [T, heads, D], contiguous in D, turned by the table's angles; contiguous result."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens, heads, head_dim = x.shape
    half = head_dim // 2
    launch(
        _rotate_head,
        tokens * heads if half else 0,
        x,
        positions,
        table,
        out,
        *(x.stride(0), x.stride(1), table.shape[0], heads, half),
        on=x,
        warps=max(1, min(8, half // 64)),
        INVERSE=inverse,
        LANES=power_of_two(half),
    )
    return out
