# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false
# The body of a kernel is written in Triton's language, whose types are not those of Python.
"""Grouped matrix products for a mixture of experts: forward and dx by rows, dweight by steps.

Order of reduction:
    That of `gemm` for each group by itself: a tile never holds rows of two groups, so the other
    groups decide nothing but which program computes it. dweight is one chain over a group's rows,
    in order, from the group's first row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistency.kernels.triton.gemm import ACCUMULATE, WRITE, finish
from consistency.kernels.triton.launch import blocks_of, launch, power_of_two, target_of
from consistency.kernels.triton.tile import chain, places_of, product_dtype, tree
from consistency.kernels.triton.tiles import tile_for


@triton.jit(do_not_specialize=["groups"])
def _grouped_rows(
    a,
    b,
    out,
    offsets,
    groups,
    n,
    k,
    a_row,
    a_step,
    b_group,
    b_step,
    b_column,
    out_row,
    out_column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
    CHUNKS: tl.constexpr,
    EVEN: tl.constexpr,
    PRODUCT: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """out[rows of g] = a[rows of g] @ b[g]; tiles are numbered group by group."""
    ids = tl.arange(0, GROUPS)
    starts = tl.load(offsets + ids, mask=ids < groups, other=0)
    ends = tl.load(offsets + ids + 1, mask=ids < groups, other=0)
    column_tiles = tl.cdiv(n, COLUMNS)
    last_tiles = tl.cumsum((ends - starts + ROWS - 1) // ROWS * column_tiles, 0)
    tiles = tl.max(last_tiles, 0).to(tl.int32)
    for place in range(tl.program_id(0), tiles, tl.num_programs(0)):
        group = tl.sum((last_tiles <= place).to(tl.int32), 0)
        before = tl.max(tl.where(ids < group, last_tiles, 0), 0)
        begin = tl.sum(tl.where(ids == group, starts, 0), 0)
        end = tl.sum(tl.where(ids == group, ends, 0), 0)
        tile = place - before
        rows = begin + tile // column_tiles * ROWS + tl.arange(0, ROWS)
        columns = (tile % column_tiles).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
        columns_read = tl.where(columns < n, columns, 0)
        steps = tl.arange(0, STEPS).to(tl.int64)
        weight = b + group.to(tl.int64) * b_group
        total, _, _ = tree(
            places_of(a, tl.where(rows < end, rows, begin), steps, a_row, a_step),
            places_of(weight, steps, columns_read, b_step, b_column),
            k // CHUNKS,
            a_step,
            b_step,
            tl.zeros((ROWS, COLUMNS), dtype=tl.float32),
            CHUNKS,
            STEPS,
            EVEN,
            PRODUCT,
        )
        inside = (rows < end)[:, None] & (columns < n)[None, :]
        target = out + rows[:, None] * out_row + columns[None, :] * out_column
        finish(total, out, target, columns_read, inside, False, 0)


@triton.jit
def _grouped_steps(
    a,
    b,
    out,
    offsets,
    m,
    n,
    a_row,
    a_step,
    b_step,
    b_column,
    out_group,
    out_row,
    out_column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
    PRODUCT: tl.constexpr,
    MODE: tl.constexpr,
):
    """out[g] = a[:, steps of g] @ b[steps of g]; one program per group and tile."""
    column_tiles = tl.cdiv(n, COLUMNS)
    tiles = tl.cdiv(m, ROWS) * column_tiles
    group = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    begin = tl.load(offsets + group)
    end = tl.load(offsets + group + 1)
    rows = (tile // column_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = (tile % column_tiles).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    columns_read = tl.where(columns < n, columns, 0)
    steps = begin + tl.arange(0, STEPS)
    total, _, _ = chain(
        places_of(a, tl.where(rows < m, rows, 0), steps, a_row, a_step),
        places_of(b, steps, columns_read, b_step, b_column),
        (end - begin).to(tl.int32),
        a_step,
        b_step,
        tl.zeros((ROWS, COLUMNS), dtype=tl.float32),
        STEPS,
        False,
        PRODUCT,
    )
    height = m
    if MODE == 1:
        # A group without rows leaves its result alone.
        height = tl.where(end > begin, m, 0)
    inside = (rows < height)[:, None] & (columns < n)[None, :]
    target = out + group * out_group + rows[:, None] * out_row + columns[None, :] * out_column
    finish(total, out, target, columns_read, inside, False, MODE)


def multiply_grouped_rows(
    a: torch.Tensor, offsets: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, chunks: int = 1
) -> torch.Tensor:
    """out[rows of g] = a[rows of g] @ b[g] for checked a [T, K], b [G, K, N], out [T, N].

    Args:
        offsets: int64 [G + 1]; group g has the rows [offsets[g], offsets[g + 1]).

    Order of reduction:
        That of this module; the tile follows T / G, a class whose members give equal bits.
    """
    groups, k, n = b.shape
    if out.numel() == 0:
        return out
    target = target_of(out)
    dtype = a.dtype if a.dtype == b.dtype else torch.float32
    tile = tile_for(target, dtype, blocks_of(a.shape[0], groups), chunks, plain=False)
    most = (blocks_of(a.shape[0], tile.rows) + groups) * blocks_of(n, tile.columns)
    launch(
        _grouped_rows,
        min(most, target.processors),
        a,
        b,
        out,
        offsets,
        *(groups, n, k),
        *a.stride(),
        *b.stride(),
        *out.stride(),
        on=out,
        warps=tile.warps,
        stages=tile.stages,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        STEPS=tile.steps,
        CHUNKS=chunks,
        EVEN=k // chunks % tile.steps == 0,
        PRODUCT=product_dtype(a, b, target.interpreted),
        GROUPS=power_of_two(groups),
    )
    return out


def multiply_grouped_steps(
    a: torch.Tensor, offsets: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, mode: int = WRITE
) -> torch.Tensor:
    """out[g] = a[:, steps of g] @ b[steps of g] for checked a [M, T], b [T, N], out [G, M, N].

    Args:
        mode: WRITE, or ACCUMULATE, which adds once in fp32 and leaves empty groups alone.

    Order of reduction:
        One chain per element over the group's steps, in order.
    """
    if mode not in (WRITE, ACCUMULATE):
        raise ValueError(f"mode must be WRITE or ACCUMULATE, got {mode}")
    groups, m, n = out.shape
    if out.numel() == 0:
        return out
    target = target_of(out)
    dtype = a.dtype if a.dtype == b.dtype else torch.float32
    tile = tile_for(target, dtype, m, 8, plain=False)
    launch(
        _grouped_steps,
        groups * blocks_of(m, tile.rows) * blocks_of(n, tile.columns),
        a,
        b,
        out,
        offsets,
        *(m, n),
        *a.stride(),
        *b.stride(),
        *out.stride(),
        on=out,
        warps=tile.warps,
        stages=tile.stages,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        STEPS=tile.steps,
        PRODUCT=product_dtype(a, b, target.interpreted),
        MODE=mode,
    )
    return out
