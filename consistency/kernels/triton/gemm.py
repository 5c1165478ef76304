# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false
# The body of a kernel is written in Triton's language, whose types are not those of Python.
"""Matrix products with the contract's order: one persistent kernel, and one that splits K.

Order of reduction:
    K is cut into C chunks of equal length. Inside a chunk each element is one chain over k of the
    target's matrix instruction (true fp32 for fp32 operands, never TF32) with an fp32 accumulator;
    across chunks the binary tree of neighbours in fp32; then the bias and one rounding. `_product`
    runs the chunks of a tile one after another, `_partials` and `_join` run them in parallel: the
    same chains and the same tree, so the same bits. An element depends on its row of a, its column
    of b, K and C alone: a tile never mixes rows, and rows past the end only repeat the first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from consistency.kernels.triton.launch import blocks_of, launch, target_of
from consistency.kernels.triton.tile import (
    chain,
    grouped_order,
    places_of,
    product_dtype,
    rounded,
    tree,
)
from consistency.kernels.triton.tiles import SPLIT_ROWS, Tile, tile_for

if TYPE_CHECKING:
    from consistency.kernels.triton.launch import Target

WRITE = 0
ACCUMULATE = 1
CONTINUE = 2

_BAND = 8
_JOIN_ELEMENTS = 1024


@triton.jit
def finish(total, bias, out, columns, inside, HAS_BIAS: tl.constexpr, MODE: tl.constexpr):
    """Adds the bias or the present value in fp32, rounds once and stores."""
    if HAS_BIAS:
        total = total + tl.load(bias + columns, mask=None).to(tl.float32)[None, :]
    if MODE == 1:
        total = tl.load(out, mask=inside, other=0.0).to(tl.float32) + total
    tl.store(out, rounded(total, out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["m", "batches"])
def _product(
    a,
    b,
    bias,
    out,
    m,
    n,
    k,
    batches,
    a_batch,
    a_row,
    a_step,
    b_batch,
    b_step,
    b_column,
    out_batch,
    out_row,
    out_column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
    CHUNKS: tl.constexpr,
    EVEN: tl.constexpr,
    PRODUCT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    MODE: tl.constexpr,
    BAND: tl.constexpr,
):
    row_tiles = tl.cdiv(m, ROWS)
    column_tiles = tl.cdiv(n, COLUMNS)
    tiles = row_tiles * column_tiles
    for place in range(tl.program_id(0), tiles * batches, tl.num_programs(0)):
        batch = (place // tiles).to(tl.int64)
        row_tile, column_tile = grouped_order(place % tiles, row_tiles, column_tiles, BAND)
        rows = row_tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        columns = column_tile.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
        rows_read = tl.where(rows < m, rows, 0)
        columns_read = tl.where(columns < n, columns, 0)
        start = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        if MODE == 2:
            running = out + batch * out_batch + rows[:, None] * out_row
            running += columns[None, :] * out_column
            start = tl.load(running, mask=(rows < m)[:, None] & (columns < n)[None, :], other=0.0)
        steps = tl.arange(0, STEPS).to(tl.int64)
        total, _, _ = tree(
            places_of(a + batch * a_batch, rows_read, steps, a_row, a_step),
            places_of(b + batch * b_batch, steps, columns_read, b_step, b_column),
            k // CHUNKS,
            a_step,
            b_step,
            start,
            CHUNKS,
            STEPS,
            EVEN,
            PRODUCT,
        )
        # After the tree, so that no address of the result lives beside the accumulators.
        inside = (rows < m)[:, None] & (columns < n)[None, :]
        target = out + batch * out_batch + rows[:, None] * out_row + columns[None, :] * out_column
        finish(total, bias, target, columns_read, inside, HAS_BIAS, MODE)


@triton.jit(do_not_specialize=["m", "batches"])
def _partials(
    a,
    b,
    partials,
    m,
    n,
    length,
    batches,
    a_batch,
    a_row,
    a_step,
    b_batch,
    b_step,
    b_column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
    CHUNKS: tl.constexpr,
    EVEN: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """partials[chunk, batch, m, n]: one chain per element; chunk c covers length steps of k."""
    column_tiles = tl.cdiv(n, COLUMNS)
    tiles = tl.cdiv(m, ROWS) * column_tiles
    place = tl.program_id(0)
    chunk = (place % CHUNKS).to(tl.int64)
    batch = (place // CHUNKS // tiles).to(tl.int64)
    tile = place // CHUNKS % tiles
    rows = (tile // column_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = (tile % column_tiles).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    steps = chunk * length + tl.arange(0, STEPS)
    total, _, _ = chain(
        places_of(a + batch * a_batch, tl.where(rows < m, rows, 0), steps, a_row, a_step),
        places_of(b + batch * b_batch, steps, tl.where(columns < n, columns, 0), b_step, b_column),
        length,
        a_step,
        b_step,
        tl.zeros((ROWS, COLUMNS), dtype=tl.float32),
        STEPS,
        EVEN,
        PRODUCT,
    )
    target = partials + ((chunk * batches + batch) * m + rows[:, None]) * n + columns[None, :]
    tl.store(target, total, mask=(rows < m)[:, None] & (columns < n)[None, :])


@triton.jit
def _tree_of_partials(partials, places, inside, elements, first, CHUNKS: tl.constexpr):
    if CHUNKS == 1:
        total = tl.load(partials + first * elements + places, mask=inside, other=0.0)
    else:
        half: tl.constexpr = CHUNKS // 2
        left = _tree_of_partials(partials, places, inside, elements, first, half)
        right = _tree_of_partials(partials, places, inside, elements, first + half, half)
        total = left + right
    return total


@triton.jit(do_not_specialize=["elements", "m"])
def _join(
    partials,
    bias,
    out,
    elements,
    m,
    n,
    out_batch,
    out_row,
    out_column,
    CHUNKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    MODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < elements
    first = tl.full((), 0, tl.int64)
    total = _tree_of_partials(partials, places, inside, elements, first, CHUNKS)
    column = places % n
    row = places // n % m
    target = out + places // n // m * out_batch + row * out_row + column * out_column
    if HAS_BIAS:
        total = total + tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if MODE == 1:
        total = tl.load(target, mask=inside, other=0.0).to(tl.float32) + total
    tl.store(target, rounded(total, out.dtype.element_ty), mask=inside)


def multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    chunks: int = 1,
    mode: int = WRITE,
) -> torch.Tensor:
    """out = a @ b + bias for checked [M, K] @ [K, N] or [B, M, K] @ [B, K, N] of any strides.

    Args:
        a, b, out: as above; the strides of each batch may be 0.
        bias: [N] contiguous, added in fp32, or None.
        chunks: a power of two that divides K.
        mode: WRITE; ACCUMULATE adds the product to `out` once, in fp32, and an empty product leaves
            it alone; CONTINUE starts each chain from `out`, which is fp32, with one chunk.

    Order of reduction:
        That of this module.
    """
    if mode != WRITE and a.shape[-1] == 0:
        return out
    plain = a.stride(-1) == 1 and b.stride(-2) == 1
    tile = tile_for(target_of(out), _product_dtype(a, b), a.shape[-2], chunks, plain=plain)
    if chunks > 1 and a.shape[-2] <= SPLIT_ROWS:
        return multiply_split(a, b, out, tile, bias=bias, chunks=chunks, mode=mode)
    return multiply_in_sequence(a, b, out, tile, bias=bias, chunks=chunks, mode=mode)


def multiply_in_sequence(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    tile: Tile,
    *,
    bias: torch.Tensor | None = None,
    chunks: int = 1,
    mode: int = WRITE,
) -> torch.Tensor:
    """`multiply` by the persistent kernel with a given tile; the tile decides no bit."""
    if out.numel() == 0:
        return out
    target = target_of(out)
    batches, m, n = _extent(out)
    k = a.shape[-1]
    tiles = batches * blocks_of(m, tile.rows) * blocks_of(n, tile.columns)
    launch(
        _product,
        min(tiles, target.processors * _programs_per_processor(target, tile)),
        a,
        b,
        out if bias is None else bias,
        out,
        *(m, n, k, batches),
        *_strides(a),
        *_strides(b),
        *_strides(out),
        on=out,
        warps=tile.warps,
        stages=tile.stages,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        STEPS=tile.steps,
        CHUNKS=chunks,
        EVEN=k // chunks % tile.steps == 0,
        PRODUCT=product_dtype(a, b, target.interpreted),
        HAS_BIAS=bias is not None,
        MODE=mode,
        BAND=_BAND,
    )
    return out


def multiply_split(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    tile: Tile,
    *,
    bias: torch.Tensor | None = None,
    chunks: int,
    mode: int = WRITE,
) -> torch.Tensor:
    """`multiply` with its chunks in parallel: the partial sums pass through memory, in fp32."""
    if out.numel() == 0:
        return out
    batches, m, n = _extent(out)
    length = a.shape[-1] // chunks
    partials = torch.empty((chunks, batches, m, n), dtype=torch.float32, device=out.device)
    launch(
        _partials,
        chunks * batches * blocks_of(m, tile.rows) * blocks_of(n, tile.columns),
        a,
        b,
        partials,
        *(m, n, length, batches),
        *_strides(a),
        *_strides(b),
        on=out,
        warps=tile.warps,
        stages=tile.stages,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        STEPS=tile.steps,
        CHUNKS=chunks,
        EVEN=length % tile.steps == 0,
        PRODUCT=product_dtype(a, b, target_of(out).interpreted),
    )
    launch(
        _join,
        blocks_of(out.numel(), _JOIN_ELEMENTS),
        partials,
        out if bias is None else bias,
        out,
        *(out.numel(), m, n),
        *_strides(out),
        on=out,
        CHUNKS=chunks,
        HAS_BIAS=bias is not None,
        MODE=mode,
        BLOCK=_JOIN_ELEMENTS,
    )
    return out


def _product_dtype(a: torch.Tensor, b: torch.Tensor) -> torch.dtype:
    return a.dtype if a.dtype == b.dtype else torch.float32


def _programs_per_processor(target: Target, tile: Tile) -> int:
    """Small tiles leave room for several programs on one multiprocessor."""
    return 1 if target.interpreted or tile.rows * tile.columns >= 128 * 128 else 2


def _extent(out: torch.Tensor) -> tuple[int, int, int]:
    return (1, *out.shape) if out.dim() == 2 else tuple(out.shape)  # type: ignore[return-value]


def _strides(x: torch.Tensor) -> tuple[int, ...]:
    return (0, *x.stride()) if x.dim() == 2 else x.stride()
