# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false
# The body of a kernel is written in Triton's language, whose types are not those of Python.
"""Causal attention on a GPU, backward, from the log-sum-exp that the forward stored.

Order of reduction:
    p = exp(score - log_sum); ds = p (do v^T - do . o) scale;
    dv += p^T do; dk += ds^T q; dq += ds k.
    One program owns a block of 64 keys and walks the tiles of rows that see it, in order; another
    owns a tile of rows and walks its blocks of keys, in order. Nothing is added atomically, so the
    gradients repeat bit for bit, and dq of a row depends on its sequence alone.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from consistency.kernels.triton.attention_tile import BLOCK_KEYS, cap, tile_of, visible
from consistency.kernels.triton.launch import blocks_of, launch, power_of_two, target_of
from consistency.kernels.triton.rows import exponential, sum_over_rows
from consistency.kernels.triton.tile import multiply_add, product_dtype, rounded


@triton.jit
def _slopes(
    query,
    outer,
    key_t,
    value_t,
    log_sum,
    delta,
    positions,
    keys,
    context,
    scale,
    window,
    limit,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRODUCT: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """(weights p, slopes ds) of a tile of rows against a block of keys."""
    zeros = tl.zeros((ROWS, KEYS), dtype=tl.float32)
    scores = cap(multiply_add(query, key_t, zeros, PRODUCT) * scale, limit, CAPPED)
    seen = visible(positions, keys, context, window, WINDOWED)
    weights = tl.where(seen, exponential(scores - log_sum[:, None]), 0.0)
    slopes = weights * (multiply_add(outer, value_t, zeros, PRODUCT) - delta[:, None]) * scale
    if CAPPED:
        ratio = tl.div_rn(scores, limit)
        slopes = slopes * (1.0 - ratio * ratio)
    return weights, tl.where(seen, slopes, 0.0)


@triton.jit
def _slopes_by_key(
    query_t,
    outer_t,
    key,
    value,
    log_sum,
    delta,
    positions,
    keys,
    context,
    scale,
    window,
    limit,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRODUCT: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """The transposes of `_slopes`, without a transposition: keys are the rows of the tile."""
    zeros = tl.zeros((KEYS, ROWS), dtype=tl.float32)
    scores = cap(multiply_add(key, query_t, zeros, PRODUCT) * scale, limit, CAPPED)
    seen = (keys[:, None] <= positions[None, :]) & (keys < context)[:, None]
    if WINDOWED:
        seen = seen & (keys[:, None] > positions[None, :] - window)
    weights = tl.where(seen, exponential(scores - log_sum[None, :]), 0.0)
    slopes = weights * (multiply_add(value, outer_t, zeros, PRODUCT) - delta[None, :]) * scale
    if CAPPED:
        ratio = tl.div_rn(scores, limit)
        slopes = slopes * (1.0 - ratio * ratio)
    return weights, tl.where(seen, slopes, 0.0)


@triton.jit
def _deltas(grad, out, deltas, rows, head_dim, HEAD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, HEAD)
    inside = lanes < head_dim
    g = tl.load(grad + row * head_dim + lanes, mask=inside, other=0.0).to(tl.float32)
    o = tl.load(out + row * head_dim + lanes, mask=inside, other=0.0).to(tl.float32)
    tl.store(deltas + row, tl.sum(g * o, 0))


@triton.jit
def _key_gradients(
    grad, q, k, v, grad_k, grad_v, log_sums, deltas, starts, sequences, group, kv_heads, head_dim,
    q_token, q_head, k_token, k_head, v_token, v_head, scale, window, limit,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRODUCT: tl.constexpr, ROWS: tl.constexpr,
    HEAD: tl.constexpr, KEYS: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    head = (place % kv_heads).to(tl.int64)
    sequence, block, blocks = tile_of(starts, sequences, 1, place // kv_heads, KEYS, SEQUENCES)
    if place // kv_heads < blocks:
        first_token = tl.load(starts + sequence).to(tl.int64)
        length = tl.load(starts + sequence + 1) - first_token
        keys = block * KEYS + tl.arange(0, KEYS)
        lanes = tl.arange(0, HEAD)
        known = keys < length
        held = known[:, None] & (lanes < head_dim)[None, :]
        tokens = first_token + keys
        k_places = k + tokens[:, None] * k_token + head * k_head + lanes[None, :]
        v_places = v + tokens[:, None] * v_token + head * v_head + lanes[None, :]
        key = tl.load(k_places, mask=held, other=0.0)
        value = tl.load(v_places, mask=held, other=0.0)
        total_k = tl.zeros((KEYS, HEAD), dtype=tl.float32)
        total_v = tl.zeros((KEYS, HEAD), dtype=tl.float32)
        last = length
        if WINDOWED:
            last = tl.minimum(length, block * KEYS + KEYS - 1 + window)
        for start in range(block * KEYS * group // ROWS * ROWS, last * group, ROWS):
            rows = start + tl.arange(0, ROWS)
            inside = rows < length * group
            token = tl.where(inside, rows // group, 0)
            query_head = head * group + rows % group
            flat = (first_token + token) * kv_heads * group + query_head
            held_rows = inside[:, None] & (lanes < head_dim)[None, :]
            source = (first_token + token) * q_token + query_head * q_head
            query = tl.load(q + source[:, None] + lanes[None, :], mask=held_rows, other=0.0)
            outer = tl.load(
                grad + flat[:, None] * head_dim + lanes[None, :], mask=held_rows, other=0.0
            )
            log_sum = tl.load(log_sums + flat, mask=inside, other=float("inf"))
            delta = tl.load(deltas + flat, mask=inside, other=0.0)
            weights, slopes = _slopes_by_key(
                tl.trans(query), tl.trans(outer), key, value, log_sum, delta, token, keys, length,
                scale, window, limit, WINDOWED, CAPPED, PRODUCT, ROWS, KEYS,
            )  # fmt: skip
            total_v = multiply_add(weights, outer, total_v, PRODUCT)
            total_k = multiply_add(slopes, query, total_k, PRODUCT)
        target = (tokens[:, None] * kv_heads + head) * head_dim + lanes[None, :]
        tl.store(grad_k + target, rounded(total_k, grad_k.dtype.element_ty), mask=held)
        tl.store(grad_v + target, rounded(total_v, grad_v.dtype.element_ty), mask=held)


@triton.jit
def _query_gradients(
    grad, q, k, v, grad_q, log_sums, deltas, starts, sequences, group, kv_heads, head_dim,
    q_token, q_head, k_token, k_head, v_token, v_head, scale, window, limit,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRODUCT: tl.constexpr, ROWS: tl.constexpr,
    HEAD: tl.constexpr, KEYS: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    head = (place % kv_heads).to(tl.int64)
    sequence, tile, tiles = tile_of(starts, sequences, group, place // kv_heads, ROWS, SEQUENCES)
    if place // kv_heads < tiles:
        first_token = tl.load(starts + sequence).to(tl.int64)
        length = tl.load(starts + sequence + 1) - first_token
        rows = tile * ROWS + tl.arange(0, ROWS)
        inside = rows < length * group
        token = tl.where(inside, rows // group, 0)
        query_head = head * group + rows % group
        flat = (first_token + token) * kv_heads * group + query_head
        lanes = tl.arange(0, HEAD)
        held_rows = inside[:, None] & (lanes < head_dim)[None, :]
        source = (first_token + token) * q_token + query_head * q_head
        query = tl.load(q + source[:, None] + lanes[None, :], mask=held_rows, other=0.0)
        place_of = flat[:, None] * head_dim + lanes[None, :]
        outer = tl.load(grad + place_of, mask=held_rows, other=0.0)
        log_sum = tl.load(log_sums + flat, mask=inside, other=float("inf"))
        delta = tl.load(deltas + flat, mask=inside, other=0.0)
        total = tl.zeros((ROWS, HEAD), dtype=tl.float32)
        low = tl.full((), 0, dtype=tl.int32)
        if WINDOWED:
            low = tl.maximum(tile * ROWS // group - window + 1, 0) // KEYS * KEYS
        high = tl.max(tl.where(inside, token, 0), 0) + 1
        for start in range(low, high, KEYS):
            keys = start + tl.arange(0, KEYS)
            known = keys < length
            held = known[:, None] & (lanes < head_dim)[None, :]
            tokens = first_token + keys
            k_places = k + tokens[:, None] * k_token + head * k_head + lanes[None, :]
            v_places = v + tokens[:, None] * v_token + head * v_head + lanes[None, :]
            key = tl.load(k_places, mask=held, other=0.0)
            value = tl.load(v_places, mask=held, other=0.0)
            _, slopes = _slopes(
                query, outer, tl.trans(key), tl.trans(value), log_sum, delta, token, keys, length,
                scale, window, limit, WINDOWED, CAPPED, PRODUCT, ROWS, KEYS,
            )  # fmt: skip
            total = multiply_add(slopes, key, total, PRODUCT)
        tl.store(grad_q + place_of, rounded(total, grad_q.dtype.element_ty), mask=held_rows)


def backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    out: torch.Tensor,
    log_sums: torch.Tensor,
    scale: float,
    mask: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(dq, dk, dv, dsinks) for contiguous grad and out; dsinks is None without sinks."""
    grads = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    grad_q, grad_k, grad_v = grads
    tokens, heads, head_dim = q.shape
    kv_heads, sequences = k.shape[1], starts.shape[0] - 1
    deltas = torch.zeros((tokens, heads), dtype=torch.float32, device=q.device)
    if q.numel() == 0:
        none = None if mask.sinks is None else torch.zeros_like(mask.sinks)
        return grad_q, grad_k.zero_(), grad_v.zero_(), none
    target = target_of(q)
    head = max(16, power_of_two(head_dim))
    small = q.dtype == torch.float32 or target.interpreted
    rows = 16 if small else 64
    launch(
        _deltas,
        tokens * heads,
        *(grad, out, deltas, tokens, head_dim),
        on=q,
        warps=1,
        HEAD=head,
    )
    shared = (
        *(log_sums, deltas, starts, sequences, heads // kv_heads, kv_heads, head_dim),
        *(q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
        *(float(scale), mask.window or 0, float(mask.soft_cap or 1.0)),
    )
    constants = {
        "WINDOWED": mask.window is not None,
        "CAPPED": mask.soft_cap is not None,
        "PRODUCT": product_dtype(q, k, target.interpreted),
        "ROWS": rows,
        "HEAD": head,
        "KEYS": BLOCK_KEYS,
        "SEQUENCES": power_of_two(sequences),
    }
    programs = (blocks_of(tokens, BLOCK_KEYS) + sequences) * kv_heads
    launch(
        _key_gradients,
        programs,
        *(grad, q, k, v, grad_k, grad_v),
        *shared,
        on=q,
        warps=8,
        **constants | {"ROWS": min(rows, 32)},
    )
    programs = (blocks_of(tokens * heads // kv_heads, rows) + sequences) * kv_heads
    launch(
        _query_gradients,
        programs,
        *(grad, q, k, v, grad_q),
        *shared,
        on=q,
        warps=8,
        **constants,
    )
    grad_sinks = None
    if mask.sinks is not None:
        # The sink's share of the softmax, times minus the row's do . o.
        grad_sinks = sum_over_rows(-(mask.sinks - log_sums).exp() * deltas)
    return grad_q, grad_k, grad_v, grad_sinks
