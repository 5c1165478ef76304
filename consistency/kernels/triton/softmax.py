# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false
# The body of a kernel is written in Triton's language, whose types are not those of Python.
"""softmax and log_softmax on a GPU; the public functions are in `consistency.kernels.softmax`.

Order of reduction:
    The maximum is exact; the exponentials of a row fold as `rows` states, one program per row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistency.kernels.triton.launch import launch
from consistency.kernels.triton.rows import exponential, lanes_of, warps_of
from consistency.kernels.triton.tile import rounded


@triton.jit
def row_statistics(x, width, LANES: tl.constexpr):
    """(max, sum of exp(x - max)) of the row at x. A NaN reaches the sum."""
    lanes = tl.arange(0, LANES)
    peaks = tl.full((LANES,), float("-inf"), dtype=tl.float32)
    for start in range(0, width, LANES):
        columns = start + lanes
        value = tl.load(x + columns, mask=columns < width, other=float("-inf")).to(tl.float32)
        peaks = tl.maximum(peaks, value)
    peak = tl.max(peaks, 0)
    sums = tl.zeros((LANES,), dtype=tl.float32)
    for start in range(0, width, LANES):
        columns = start + lanes
        value = tl.load(x + columns, mask=columns < width, other=float("-inf")).to(tl.float32)
        sums += exponential(value - peak)
    return peak, tl.sum(sums, 0)


@triton.jit
def _forward_row(x, out, width, LOGARITHM: tl.constexpr, LANES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    peak, total = row_statistics(x + row * width, width, LANES)
    for start in range(0, width, LANES):
        columns = start + tl.arange(0, LANES)
        inside = columns < width
        value = tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        if LOGARITHM:
            result = value - peak - tl.log(total)
        else:
            result = tl.div_rn(exponential(value - peak), total)
        tl.store(out + row * width + columns, result, mask=inside)


@triton.jit
def _backward_row(grad, y, grad_x, width, LOGARITHM: tl.constexpr, LANES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    sums = tl.zeros((LANES,), dtype=tl.float32)
    for start in range(0, width, LANES):
        columns = start + lanes
        inside = columns < width
        outer = tl.load(grad + row * width + columns, mask=inside, other=0.0)
        if LOGARITHM:
            sums += outer
        else:
            sums = tl.fma(outer, tl.load(y + row * width + columns, mask=inside, other=0.0), sums)
    total = tl.sum(sums, 0)
    for start in range(0, width, LANES):
        columns = start + lanes
        inside = columns < width
        outer = tl.load(grad + row * width + columns, mask=inside, other=0.0)
        value = tl.load(y + row * width + columns, mask=inside, other=0.0)
        result = value * (outer - total)
        if LOGARITHM:
            result = tl.fma(-exponential(value), total, outer)
        tl.store(
            grad_x + row * width + columns, rounded(result, grad_x.dtype.element_ty), mask=inside
        )


def forward(x: torch.Tensor, logarithm: bool) -> torch.Tensor:
    """fp32 [..., W] for contiguous x."""
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    width = x.shape[-1]
    launch(
        _forward_row,
        x.shape[:-1].numel() if width else 0,
        x,
        out,
        width,
        on=x,
        warps=warps_of(width),
        LOGARITHM=logarithm,
        LANES=lanes_of(width),
    )
    return out


def backward(
    grad: torch.Tensor, y: torch.Tensor, dtype: torch.dtype, logarithm: bool
) -> torch.Tensor:
    """dx in `dtype` for contiguous grad and y."""
    grad_x = torch.empty(y.shape, dtype=dtype, device=y.device)
    width = y.shape[-1]
    launch(
        _backward_row,
        y.shape[:-1].numel() if width else 0,
        grad,
        y,
        grad_x,
        width,
        on=y,
        warps=warps_of(width),
        LOGARITHM=logarithm,
        LANES=lanes_of(width),
    )
    return grad_x
