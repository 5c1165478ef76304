# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false
# The body of a kernel is written in Triton's language, whose types are not those of Python.
"""Causal attention on a GPU, forward; the public functions are in `consistency.kernels.attention`.

Order of reduction:
    Keys are cut into splits of 512 at absolute positions (one split where the head dimension is
    above 128), a split into blocks of 64. A split starts its own online softmax and takes its
    blocks in order; splits are merged in order by their log-sum-exp. Prefill does so in one
    program, decode runs the splits of a row in parallel and merges them afterwards by the same
    formula, so both give the same bits. Blocks that a query cannot see change no bit, wherever the
    loop begins. Every call of a dtype and head dimension uses one tile, so a row sees one
    instruction and one layout. A sink joins last, as one more term of the sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from consistency.kernels.triton.attention_tile import (
    BLOCK_KEYS,
    add_block,
    cap,
    key_offsets,
    merge,
    shift_of,
    tile_of,
    visible,
)
from consistency.kernels.triton.launch import blocks_of, launch, power_of_two, target_of
from consistency.kernels.triton.rows import exponential
from consistency.kernels.triton.tile import multiply_add, product_dtype, rounded

if TYPE_CHECKING:
    from consistency.kernels.triton.launch import Target

_SPLIT = 512
_WIDEST_SPLIT_HEAD = 128


@dataclass(frozen=True, slots=True)
class Mask:
    """What the scores go through: a window of keys, a sink per head, a soft cap; None for none."""

    window: int | None = None
    sinks: torch.Tensor | None = None
    soft_cap: float | None = None


@triton.jit
def _range_state(
    queries,
    positions,
    k,
    v,
    table,
    first_token,
    context,
    first,
    last,
    k_block,
    k_token,
    v_block,
    v_token,
    block_size,
    head_dim,
    scale,
    window,
    limit,
    PAGED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRODUCT: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD: tl.constexpr,
    KEYS: tl.constexpr,
):
    """(peak, total, output) over the keys [first, last), block by block."""
    lanes = tl.arange(0, HEAD)
    peak = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    output = tl.zeros((ROWS, HEAD), dtype=tl.float32)
    for start in range(first, last, KEYS):
        keys = start + tl.arange(0, KEYS)
        known = keys < context
        k_places = key_offsets(keys, known, table, first_token, k_block, k_token, block_size, PAGED)
        v_places = key_offsets(keys, known, table, first_token, v_block, v_token, block_size, PAGED)
        whole = known[None, :] & (lanes < head_dim)[:, None]
        key = tl.load(k + k_places[None, :] + lanes[:, None], mask=whole, other=0.0)
        whole = known[:, None] & (lanes < head_dim)[None, :]
        value = tl.load(v + v_places[:, None] + lanes[None, :], mask=whole, other=0.0)
        zeros = tl.zeros((ROWS, KEYS), dtype=tl.float32)
        scores = cap(multiply_add(queries, key, zeros, PRODUCT) * scale, limit, CAPPED)
        seen = visible(positions, keys, context, window, WINDOWED)
        scores = tl.where(seen, scores, float("-inf"))
        peak, total, output = add_block(scores, value, peak, total, output, PRODUCT)
    return peak, total, output


@triton.jit
def _attend(
    q,
    k,
    v,
    out,
    log_sums,
    partials,
    starts,
    contexts,
    tables,
    sinks,
    sequences,
    tokens,
    group,
    kv_heads,
    head_dim,
    table_width,
    block_size,
    q_token,
    q_head,
    k_block,
    k_token,
    k_head,
    v_block,
    v_token,
    v_head,
    scale,
    window,
    limit,
    splits,
    PAGED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    STORE_SUMS: tl.constexpr,
    PARALLEL: tl.constexpr,
    SPLIT: tl.constexpr,
    PRODUCT: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD: tl.constexpr,
    KEYS: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    """A tile of rows of one sequence and key head: all its splits, or with PARALLEL one of them."""
    place = tl.program_id(0)
    split = place % splits
    head = (place // splits % kv_heads).to(tl.int64)
    sequence, tile, tiles = tile_of(
        starts, sequences, group, place // splits // kv_heads, ROWS, SEQUENCES
    )
    if place // splits // kv_heads < tiles:
        first_token = tl.load(starts + sequence).to(tl.int64)
        queries = tl.load(starts + sequence + 1) - first_token
        context = queries
        if PAGED:
            context = tl.load(contexts + sequence).to(tl.int64)
        rows = tile * ROWS + tl.arange(0, ROWS)
        inside = rows < queries * group
        token = tl.where(inside, rows // group, 0)
        query_head = head * group + rows % group
        positions = context - queries + token
        lanes = tl.arange(0, HEAD)
        held = inside[:, None] & (lanes < head_dim)[None, :]
        source = (first_token + token) * q_token + query_head * q_head
        query = tl.load(q + source[:, None] + lanes[None, :], mask=held, other=0.0)
        low = tl.full((), 0, dtype=tl.int64)
        if WINDOWED:
            oldest = tl.min(positions, 0) - window + 1
            low = tl.maximum(oldest, 0) // KEYS * KEYS
        high = tl.minimum(context, tl.max(tl.where(inside, positions, 0), 0) + 1)
        table = tables + sequence.to(tl.int64) * table_width
        k_base = k + head * k_head
        v_base = v + head * v_head
        if PARALLEL:
            begin = tl.maximum(split * SPLIT, low)
            end = tl.minimum((split + 1) * SPLIT, high)
            peak, total, output = _range_state(
                query, positions, k_base, v_base, table, first_token, context, begin, end,
                k_block, k_token, v_block, v_token, block_size, head_dim, scale, window, limit,
                PAGED, WINDOWED, CAPPED, PRODUCT, ROWS, HEAD, KEYS,
            )  # fmt: skip
            row = ((first_token + token) * kv_heads * group + query_head) * splits + split
            record = partials + row * (HEAD + 2)
            tl.store(record + HEAD, peak, mask=inside)
            tl.store(record + HEAD + 1, total, mask=inside)
            tl.store(record[:, None] + lanes[None, :], output, mask=held)
        else:
            if SPLIT == 0:
                peak, total, output = _range_state(
                    query, positions, k_base, v_base, table, first_token, context, low, high,
                    k_block, k_token, v_block, v_token, block_size, head_dim, scale, window, limit,
                    PAGED, WINDOWED, CAPPED, PRODUCT, ROWS, HEAD, KEYS,
                )  # fmt: skip
            else:
                peak = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
                total = tl.zeros((ROWS,), dtype=tl.float32)
                output = tl.zeros((ROWS, HEAD), dtype=tl.float32)
                for number in range(low // SPLIT, tl.cdiv(high, SPLIT)):
                    begin = tl.maximum(number * SPLIT, low)
                    end = tl.minimum((number + 1) * SPLIT, high)
                    other_peak, other_total, other_output = _range_state(
                        query, positions, k_base, v_base, table, first_token, context, begin, end,
                        k_block, k_token, v_block, v_token, block_size, head_dim, scale, window,
                        limit, PAGED, WINDOWED, CAPPED, PRODUCT, ROWS, HEAD, KEYS,
                    )  # fmt: skip
                    peak, total, output = merge(
                        peak, total, output, other_peak, other_total, other_output
                    )
            target = (first_token + token) * kv_heads * group + query_head
            _finish(
                peak, total, output, out, log_sums, sinks, target, query_head, inside, head_dim,
                HAS_SINKS, STORE_SUMS, HEAD,
            )  # fmt: skip


@triton.jit
def _finish(
    peak,
    total,
    output,
    out,
    log_sums,
    sinks,
    target,
    query_head,
    inside,
    head_dim,
    HAS_SINKS: tl.constexpr,
    STORE_SUMS: tl.constexpr,
    HEAD: tl.constexpr,
):
    """Joins the sink, divides, rounds once and stores row `target`."""
    lanes = tl.arange(0, HEAD)
    if HAS_SINKS:
        sink = tl.load(sinks + query_head, mask=inside, other=0.0)
        shift = shift_of(tl.maximum(peak, sink))
        rescale = exponential(peak - shift)
        total = total * rescale + exponential(sink - shift)
        output = output * rescale[:, None]
        peak = tl.maximum(peak, sink)
    result = rounded(tl.div_rn(output, total[:, None]), out.dtype.element_ty)
    held = inside[:, None] & (lanes < head_dim)[None, :]
    tl.store(out + target[:, None] * head_dim + lanes[None, :], result, mask=held)
    if STORE_SUMS:
        tl.store(log_sums + target, peak + tl.log(total), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _merge_splits(
    partials,
    out,
    starts,
    contexts,
    sinks,
    sequences,
    tokens,
    heads,
    head_dim,
    window,
    splits,
    WINDOWED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    HEAD: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    """One (token, head): its splits in order, by the formula of the sequential kernel."""
    target = tl.program_id(0).to(tl.int64) + tl.zeros((1,), dtype=tl.int64)
    token = tl.program_id(0) // heads
    ids = tl.arange(0, SEQUENCES)
    ends = tl.load(starts + ids + 1, mask=ids < sequences, other=0x7FFFFFFF)
    sequence = tl.sum((ends <= token).to(tl.int32), 0)
    end = tl.load(starts + sequence + 1)
    position = tl.load(contexts + sequence) - end + token
    low = 0
    if WINDOWED:
        low = tl.maximum(position - window + 1, 0) // SPLIT
    lanes = tl.arange(0, HEAD)
    held = (lanes < head_dim)[None, :]
    peak = tl.full((1,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((1,), dtype=tl.float32)
    output = tl.zeros((1, HEAD), dtype=tl.float32)
    for split in range(low, position // SPLIT + 1):
        record = partials + (target * splits + split) * (HEAD + 2)
        other_peak = tl.load(record + HEAD)
        other_total = tl.load(record + HEAD + 1)
        other = tl.load(record[:, None] + lanes[None, :], mask=held, other=0.0)
        peak, total, output = merge(peak, total, output, other_peak, other_total, other)
    inside = target >= 0
    _finish(
        peak, total, output, out, out, sinks, target, target % heads, inside, head_dim,
        HAS_SINKS, False, HEAD,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """The tile and the split of one dtype and head dimension."""

    rows: int
    head: int
    split: int
    warps: int
    stages: int


def shape_for(target: Target, dtype: torch.dtype, head_dim: int) -> Shape:
    """A function of the target, the dtype and the head dimension alone, so of no batch."""
    head = max(16, power_of_two(head_dim))
    split = _SPLIT if head <= _WIDEST_SPLIT_HEAD else 0
    if target.interpreted:
        return Shape(16, head, split, 4, 1)
    if dtype == torch.float32:
        return Shape(16, head, split, 8, 1)
    return Shape(64, head, split, 8, 2)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    scale: float,
    pages: Any,
    log_sums: torch.Tensor | None,
    mask: Mask,
    *,
    parallel: bool | None = None,
) -> torch.Tensor:
    """Attention of checked arguments; see `consistency.kernels.attention`.

    Args:
        pages: None, or where the keys lie: block_tables, context_lengths, block_size.
        mask: window, sinks and soft_cap, each None or set.
        log_sums: fp32 [T, Hq] to be filled for the backward, or None.
        parallel: run the splits in parallel; None decides by the work. It decides no bit.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if q.numel() == 0:
        return out
    tokens, heads, head_dim = q.shape
    kv_heads, sequences = k.shape[-2], starts.shape[0] - 1
    target = target_of(q)
    shape = shape_for(target, q.dtype, head_dim)
    tiles = blocks_of(tokens * heads // kv_heads, shape.rows) + sequences
    most = pages.block_tables.shape[1] * pages.block_size if pages is not None else 0
    splits = blocks_of(most, shape.split) if shape.split else 1
    if parallel is None:
        parallel = tiles * kv_heads < 2 * target.processors
    parallel = parallel and pages is not None and splits > 1
    partials = log_sums if log_sums is not None else out
    if parallel:
        size = (tokens, heads, splits, shape.head + 2)
        partials = torch.empty(size, dtype=torch.float32, device=q.device)
    tables = starts if pages is None else pages.block_tables
    contexts = starts if pages is None else pages.context_lengths
    sinks = out if mask.sinks is None else mask.sinks
    flags = {"WINDOWED": mask.window is not None, "HAS_SINKS": mask.sinks is not None}
    sizes = {"HEAD": shape.head, "SEQUENCES": power_of_two(sequences), "SPLIT": shape.split}
    launch(
        _attend,
        tiles * kv_heads * (splits if parallel else 1),
        *(q, k, v, out, out if log_sums is None else log_sums, partials),
        *(starts, contexts, tables, sinks),
        *(sequences, tokens, heads // kv_heads, kv_heads, head_dim),
        *(tables.shape[-1], 1 if pages is None else pages.block_size),
        *(q.stride(0), q.stride(1), *_strides(k), *_strides(v)),
        *(float(scale), mask.window or 0, float(mask.soft_cap or 1.0)),
        splits if parallel else 1,
        on=q,
        warps=shape.warps,
        stages=shape.stages,
        PAGED=pages is not None,
        CAPPED=mask.soft_cap is not None,
        STORE_SUMS=log_sums is not None,
        PARALLEL=parallel,
        PRODUCT=product_dtype(q, k, target.interpreted),
        ROWS=shape.rows,
        KEYS=BLOCK_KEYS,
        **flags,
        **sizes,
    )
    if parallel:
        launch(
            _merge_splits,
            tokens * heads,
            *(partials, out, starts, contexts, sinks),
            *(sequences, tokens, heads, head_dim, mask.window or 0, splits),
            on=q,
            warps=1,
            **flags,
            **sizes,
        )
    return out


def _strides(x: torch.Tensor) -> tuple[int, ...]:
    """Strides (block, token, head) of keys or values."""
    return (0, *x.stride()[:2]) if x.dim() == 3 else x.stride()[:3]


def first_fault(starts: torch.Tensor, tokens: int, pages: Any) -> int:
    """-1, or sequence * 4 + reason, in the code of cpu/attention.cpp: what is wrong with values."""
    bounds = starts.tolist()
    sequences = len(bounds) - 1
    if bounds[0] != 0:
        return 0
    contexts = [0] * sequences if pages is None else pages.context_lengths.tolist()
    for sequence in range(sequences):
        queries = bounds[sequence + 1] - bounds[sequence]
        if queries < 0:
            return sequence * 4
        if pages is None:
            continue
        if contexts[sequence] < queries:
            return sequence * 4 + 1
        if contexts[sequence] > pages.block_tables.shape[1] * pages.block_size:
            return sequence * 4 + 2
    if bounds[-1] != tokens:
        return max(sequences - 1, 0) * 4
    if pages is not None and sequences:
        columns = torch.arange(pages.block_tables.shape[1], device=starts.device)
        used = columns * pages.block_size < pages.context_lengths[:, None]
        bad = used & ((pages.block_tables < 0) | (pages.block_tables >= pages.blocks))
        if bool(bad.any()):
            return int(bad.any(1).nonzero()[0]) * 4 + 3
    return -1
