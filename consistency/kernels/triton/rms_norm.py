# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false
# The body of a kernel is written in Triton's language, whose types are not those of Python.
"""rms_norm on a GPU; the public function is in `consistency.kernels.rms_norm`.

Order of reduction:
    The squares of a row, and the products of the backward, fold as `rows` states. dweight adds 32
    rows in order, and joins such blocks 32 by 32.
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
    x, weight, out, inverse_rms, width, eps, OFFSET: tl.constexpr, LANES: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    squares = tl.zeros((LANES,), dtype=tl.float32)
    for start in range(0, width, LANES):
        columns = start + lanes
        value = tl.load(x + row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
        squares = tl.fma(value, value, squares)
    mean = tl.div_rn(tl.sum(squares, 0), width.to(tl.float32))
    inverse = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    tl.store(inverse_rms + row, inverse)
    for start in range(0, width, LANES):
        columns = start + lanes
        inside = columns < width
        value = tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) + OFFSET
        result = value * inverse * scale
        tl.store(out + row * width + columns, rounded(result, out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_row(
    grad, x, weight, inverse_rms, grad_x, width, OFFSET: tl.constexpr, LANES: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    inverse = tl.load(inverse_rms + row)
    products = tl.zeros((LANES,), dtype=tl.float32)
    for start in range(0, width, LANES):
        columns = start + lanes
        inside = columns < width
        outer = tl.load(grad + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) + OFFSET
        value = tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        products = tl.fma(outer * scale, value * inverse, products)
    mean = tl.div_rn(tl.sum(products, 0), width.to(tl.float32))
    for start in range(0, width, LANES):
        columns = start + lanes
        inside = columns < width
        outer = tl.load(grad + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) + OFFSET
        value = tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        result = tl.fma(value * inverse, -mean, outer * scale) * inverse
        tl.store(
            grad_x + row * width + columns, rounded(result, grad_x.dtype.element_ty), mask=inside
        )


@triton.jit(do_not_specialize=["rows"])
def _weight_gradient(
    grad, x, inverse_rms, out, rows, width, SPAN: tl.constexpr, COLUMNS: tl.constexpr
):
    column_blocks = tl.cdiv(width, COLUMNS)
    place = tl.program_id(0)
    block = (place // column_blocks).to(tl.int64)
    columns = place % column_blocks * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for row in range(block * SPAN, tl.minimum(rows, (block + 1) * SPAN)):
        outer = tl.load(grad + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        total = tl.fma(outer, value * tl.load(inverse_rms + row), total)
    tl.store(out + block * width + columns, total, mask=inside)


def forward(
    x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, 1 / rms per row in fp32) for contiguous x [..., W]."""
    out = torch.empty_like(x)
    width = weight.shape[0]
    inverse_rms = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return out, inverse_rms
    launch(
        _forward_row,
        inverse_rms.numel(),
        x,
        weight,
        out,
        inverse_rms,
        width,
        float(eps),
        on=x,
        warps=warps_of(width),
        OFFSET=float(zero_centered),
        LANES=lanes_of(width),
    )
    return out, inverse_rms


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    zero_centered: bool,
    inverse_rms: torch.Tensor,
    needs: tuple[bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(dx in the dtype of x, dweight in fp32), None where `needs` says so."""
    width = weight.shape[0]
    grad_x = grad_weight = None
    rows = inverse_rms.numel() if width else 0
    if needs[0]:
        grad_x = torch.empty_like(x)
        launch(
            _backward_row,
            rows,
            grad,
            x,
            weight,
            inverse_rms,
            grad_x,
            width,
            on=x,
            warps=warps_of(width),
            OFFSET=float(zero_centered),
            LANES=lanes_of(width),
        )
    if needs[1]:
        blocks = blocks_of(rows, ROWS_PER_SUM)
        sums = torch.empty((blocks, width), dtype=torch.float32, device=x.device)
        launch(
            _weight_gradient,
            blocks * blocks_of(width, COLUMNS_PER_SUM),
            grad,
            x,
            inverse_rms,
            sums,
            *(rows, width),
            on=x,
            SPAN=ROWS_PER_SUM,
            COLUMNS=COLUMNS_PER_SUM,
        )
        grad_weight = sum_over_rows(sums)
    return grad_x, grad_weight
