# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false
# The body of a kernel is written in Triton's language, whose types are not those of Python.
"""Pieces that every matrix kernel is built from: a chunk's chain, the tree of chunks, the store."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

# Fixed when Triton is imported, as is the choice between compiling and interpreting.
_INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))


@triton.jit
def rounded(x, KIND: tl.constexpr):
    """fp32 to KIND, to the nearest, ties to even.

    The interpreter's own conversion to bfloat16 truncates; there the rounding is done on the bits.
    """
    if tl.float32 == KIND:
        result = x
    elif tl.bfloat16 == KIND and _INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        bits = tl.where(x == x, nearest, bits)
        result = bits.to(tl.float32, bitcast=True).to(tl.bfloat16)
    else:
        result = x.to(KIND, fp_downcast_rounding="rtne")
    return result


@triton.jit
def multiply_add(a, b, total, PRODUCT: tl.constexpr):
    """total + a @ b in fp32. PRODUCT is the dtype of the operands, fp32 for a true fp32 product."""
    return tl.dot(a.to(PRODUCT), b.to(PRODUCT), total, input_precision="ieee")


@triton.jit
def chain(
    a_places,
    b_places,
    length,
    a_step,
    b_step,
    total,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """total + a @ b over the next `length` steps of k, in order, and the places after them."""
    steps = tl.arange(0, STEPS)
    for done in range(0, length, STEPS):
        if EVEN:
            left = tl.load(a_places)
            right = tl.load(b_places)
        else:
            inside = steps < length - done
            left = tl.load(a_places, mask=inside[None, :], other=0.0)
            right = tl.load(b_places, mask=inside[:, None], other=0.0)
        total = multiply_add(left, right, total, PRODUCT)
        a_places += STEPS * a_step
        b_places += STEPS * b_step
    if not EVEN:
        beyond = tl.cdiv(length, STEPS) * STEPS - length
        a_places -= beyond * a_step
        b_places -= beyond * b_step
    return total, a_places, b_places


@triton.jit
def tree(
    a_places,
    b_places,
    length,
    a_step,
    b_step,
    start,
    CHUNKS: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """The next CHUNKS chains of `length` steps joined by the binary tree of neighbours.

    Every chain begins at `start`: zeros, or with one chunk a running total. The places move along,
    so that no chain computes addresses of its own and the accumulators keep their registers.
    """
    if CHUNKS == 1:
        total, a_places, b_places = chain(
            a_places, b_places, length, a_step, b_step, start, STEPS, EVEN, PRODUCT
        )
    else:
        half: tl.constexpr = CHUNKS // 2
        left, a_places, b_places = tree(
            a_places, b_places, length, a_step, b_step, start, half, STEPS, EVEN, PRODUCT
        )
        right, a_places, b_places = tree(
            a_places, b_places, length, a_step, b_step, start, half, STEPS, EVEN, PRODUCT
        )
        total = left + right
    return total, a_places, b_places


@triton.jit
def places_of(base, rows, columns, row_stride, column_stride):
    """Addresses of base[rows, columns]."""
    return base + rows[:, None] * row_stride + columns[None, :] * column_stride


@triton.jit
def grouped_order(tile, row_tiles, column_tiles, BAND: tl.constexpr):
    """(row tile, column tile) of the tile-th tile: bands of BAND row tiles share columns in L2."""
    band = tile // (BAND * column_tiles)
    height = tl.minimum(row_tiles - band * BAND, BAND)
    inside = tile - band * BAND * column_tiles
    return band * BAND + inside % height, inside // height


def product_dtype(a: torch.Tensor, b: torch.Tensor, interpreted: bool) -> Any:
    """The dtype in which two operands are multiplied: their own if it is one 16-bit dtype, or fp32.

    The interpreter has no bfloat16 product. Widening first is exact, because a product of two
    16-bit numbers is exact in fp32.
    """
    if a.dtype == b.dtype and a.dtype != torch.float32 and not interpreted:
        return tl.bfloat16 if a.dtype == torch.bfloat16 else tl.float16
    return tl.float32
