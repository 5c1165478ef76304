# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false
# The body of a kernel is written in Triton's language, whose types are not those of Python.
"""layer_norm on a GPU; the public function is in `consistency.kernels.layer_norm`.

Order of reduction:
    Mean and variance take a pass each and fold as `rows` states, as do the two sums of the
    backward. dweight and dbias add 32 rows in order, and join such blocks 32 by 32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistency.kernels.triton.launch import blocks_of, launch
from consistency.kernels.triton.rows import (
    COLUMNS_PER_SUM,
    ROWS_PER_SUM,
    lanes_of,
    sum_over_rows,
    warps_of,
)
from consistency.kernels.triton.tile import rounded


@triton.jit
def _forward_row(
    x,
    weight,
    bias,
    out,
    moments,
    width,
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    source = x + row * width
    sums = tl.zeros((LANES,), dtype=tl.float32)
    for start in range(0, width, LANES):
        columns = start + lanes
        sums += tl.load(source + columns, mask=columns < width, other=0.0).to(tl.float32)
    mean = tl.div_rn(tl.sum(sums, 0), width.to(tl.float32))
    squares = tl.zeros((LANES,), dtype=tl.float32)
    for start in range(0, width, LANES):
        columns = start + lanes
        value = tl.load(source + columns, mask=columns < width, other=0.0).to(tl.float32) - mean
        value = tl.where(columns < width, value, 0.0)
        squares = tl.fma(value, value, squares)
    variance = tl.div_rn(tl.sum(squares, 0), width.to(tl.float32))
    inverse = tl.div_rn(1.0, tl.sqrt_rn(variance + eps))
    tl.store(moments + 2 * row, mean)
    tl.store(moments + 2 * row + 1, inverse)
    for start in range(0, width, LANES):
        columns = start + lanes
        inside = columns < width
        value = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
        result = (value - mean) * inverse
        if HAS_WEIGHT:
            result = result * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            result = result + tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * width + columns, rounded(result, out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_row(
    grad, x, weight, moments, grad_x, width, HAS_WEIGHT: tl.constexpr, LANES: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    mean = tl.load(moments + 2 * row)
    inverse = tl.load(moments + 2 * row + 1)
    sums = tl.zeros((LANES,), dtype=tl.float32)
    products = tl.zeros((LANES,), dtype=tl.float32)
    for start in range(0, width, LANES):
        columns = start + lanes
        inside = columns < width
        outer = tl.load(grad + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            outer = outer * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        sums += outer
        products = tl.fma(outer, (value - mean) * inverse, products)
    average = tl.div_rn(tl.sum(sums, 0), width.to(tl.float32))
    projection = tl.div_rn(tl.sum(products, 0), width.to(tl.float32))
    for start in range(0, width, LANES):
        columns = start + lanes
        inside = columns < width
        outer = tl.load(grad + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            outer = outer * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        result = tl.fma((value - mean) * inverse, -projection, outer - average) * inverse
        target = grad_x + row * width + columns
        tl.store(target, rounded(result, grad_x.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _parameter_gradients(
    grad, x, moments, weight_sums, bias_sums, rows, width, SPAN: tl.constexpr, COLUMNS: tl.constexpr
):
    column_blocks = tl.cdiv(width, COLUMNS)
    place = tl.program_id(0)
    block = (place // column_blocks).to(tl.int64)
    columns = place % column_blocks * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    products = tl.zeros((COLUMNS,), dtype=tl.float32)
    sums = tl.zeros((COLUMNS,), dtype=tl.float32)
    for row in range(block * SPAN, tl.minimum(rows, (block + 1) * SPAN)):
        outer = tl.load(grad + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        normal = (value - tl.load(moments + 2 * row)) * tl.load(moments + 2 * row + 1)
        products = tl.fma(outer, normal, products)
        sums += outer
    tl.store(weight_sums + block * width + columns, products, mask=inside)
    tl.store(bias_sums + block * width + columns, sums, mask=inside)


def forward(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, (mean, 1 / deviation) per row as fp32 [rows, 2]) for contiguous x [..., W]."""
    width = x.shape[-1]
    out = torch.empty_like(x)
    rows = x.shape[:-1].numel()
    moments = torch.empty((rows, 2), dtype=torch.float32, device=x.device)
    launch(
        _forward_row,
        rows if width else 0,
        x,
        x if weight is None else weight,
        x if bias is None else bias,
        out,
        moments,
        width,
        float(eps),
        on=x,
        warps=warps_of(width),
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        LANES=lanes_of(width),
    )
    return out, moments


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    moments: torch.Tensor,
    wanted: tuple[bool, bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """(dx in the dtype of x, dweight and dbias in fp32), None where not wanted."""
    width = x.shape[-1]
    rows = moments.shape[0] if width else 0
    grad_x = grad_weight = grad_bias = None
    if wanted[0]:
        grad_x = torch.empty_like(x)
        launch(
            _backward_row,
            rows,
            grad,
            x,
            x if weight is None else weight,
            moments,
            grad_x,
            width,
            on=x,
            warps=warps_of(width),
            HAS_WEIGHT=weight is not None,
            LANES=lanes_of(width),
        )
    if wanted[1] or wanted[2]:
        blocks = blocks_of(rows, ROWS_PER_SUM)
        sums = torch.empty((2, blocks, width), dtype=torch.float32, device=x.device)
        launch(
            _parameter_gradients,
            blocks * blocks_of(width, COLUMNS_PER_SUM),
            grad,
            x,
            moments,
            *sums.unbind(),
            *(rows, width),
            on=x,
            SPAN=ROWS_PER_SUM,
            COLUMNS=COLUMNS_PER_SUM,
        )
        grad_weight = sum_over_rows(sums[0]) if wanted[1] else None
        grad_bias = sum_over_rows(sums[1]) if wanted[2] else None
    return grad_x, grad_weight, grad_bias
