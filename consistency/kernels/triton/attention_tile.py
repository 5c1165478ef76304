# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false
# The body of a kernel is written in Triton's language, whose types are not those of Python.
"""Pieces of the attention kernels: which tile a program holds, where keys lie, scores, merging.

The rows of a (sequence, key head) are numbered position * group + head of the group, so that one
tile holds all query heads that share keys. A row's bits do not depend on its place in a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from consistency.kernels.triton.rows import exponential
from consistency.kernels.triton.tile import multiply_add

BLOCK_KEYS = 64
"""Keys per block of the online softmax, at absolute positions: the contract's attention_block."""


@triton.jit
def tile_of(starts, sequences, group, place, ROWS: tl.constexpr, SEQUENCES: tl.constexpr):
    """(sequence, tile in it, number of tiles): tiles are numbered sequence by sequence."""
    ids = tl.arange(0, SEQUENCES)
    known = ids < sequences
    begin = tl.load(starts + ids, mask=known, other=0)
    end = tl.load(starts + ids + 1, mask=known, other=0)
    last = tl.cumsum(((end - begin) * group + ROWS - 1) // ROWS, 0)
    sequence = tl.sum((last <= place).to(tl.int32), 0)
    before = tl.max(tl.where(ids < sequence, last, 0), 0)
    return sequence, place - before, tl.max(last, 0)


@triton.jit
def key_offsets(
    positions,
    inside,
    table,
    first_token,
    block_stride,
    token_stride,
    block_size,
    PAGED: tl.constexpr,
):
    """Element offsets of keys at `positions` of a sequence, before the head's."""
    if PAGED:
        block = tl.load(table + positions // block_size, mask=inside, other=0).to(tl.int64)
        offsets = block * block_stride + (positions % block_size) * token_stride
    else:
        offsets = (first_token + positions) * token_stride
    return offsets


@triton.jit
def cap(scores, limit, CAPPED: tl.constexpr):
    """limit * tanh(scores / limit), or the scores."""
    if CAPPED:
        twice = exponential(2.0 * tl.div_rn(scores, limit))
        scores = limit * (1.0 - tl.div_rn(2.0, twice + 1.0))
    return scores


@triton.jit
def visible(positions, keys, context, window, WINDOWED: tl.constexpr):
    """Which keys each query sees: those up to itself, at most `window` of them."""
    seen = (keys[None, :] <= positions[:, None]) & (keys < context)[None, :]
    if WINDOWED:
        seen = seen & (keys[None, :] > positions[:, None] - window)
    return seen


@triton.jit
def shift_of(peak):
    """What exponents are taken relative to; a row that has seen no key has no peak."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def add_block(scores, values, peak, total, output, PRODUCT: tl.constexpr):
    """One block of the online softmax: (peak, total, output) after these scores and values."""
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    shift = shift_of(new_peak)
    weights = exponential(scores - shift[:, None])
    rescale = exponential(peak - shift)
    total = total * rescale + tl.sum(weights, 1)
    output = multiply_add(weights, values, output * rescale[:, None], PRODUCT)
    return new_peak, total, output


@triton.jit
def merge(peak, total, output, other_peak, other_total, other_output):
    """The state of two ranges of keys, the earlier one first."""
    new_peak = tl.maximum(peak, other_peak)
    shift = shift_of(new_peak)
    left = exponential(peak - shift)
    right = exponential(other_peak - shift)
    total = total * left + other_total * right
    output = output * left[:, None] + other_output * right[:, None]
    return new_peak, total, output
