# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false
# The body of a kernel is written in Triton's language, whose types are not those of Python.
"""Log-probability and entropy of a token from fp32 logits on a GPU; see `kernels.lm_head`.

Order of reduction:
    The vocabulary is cut into the contract's parts. A part has its own maximum and folds into 1024
    lanes by index modulo 1024, in order; the lanes join by the tree of `tl.sum`. Parts join by the
    binary tree of neighbours, each join shifting both sides to the larger maximum. A rank that
    holds a power-of-two share of the parts computes a subtree. Logarithms are taken in fp64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistency.kernels.triton.launch import blocks_of, launch
from consistency.kernels.triton.rows import exponential

_LANES = 1024
_TOKENS = 64
_BLOCK = 1024
# Replaces -inf in products with a probability of exactly zero, where 0 * -inf would be NaN.
_FLOOR = tl.constexpr(-1e30)


@triton.jit
def _part_statistics(
    logits,
    targets,
    partials,
    row_stride,
    rows,
    width,
    parts,
    first,
    temperature,
    LANES: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = place // parts
    part = place % parts
    length = width // parts
    lanes = tl.arange(0, LANES)
    source = logits + row * row_stride + part * length
    peaks = tl.full((LANES,), float("-inf"), dtype=tl.float32)
    for start in range(0, length, LANES):
        columns = start + lanes
        value = tl.load(source + columns, mask=columns < length, other=float("-inf"))
        peaks = tl.maximum(peaks, tl.div_rn(value, temperature))
    peak = tl.max(peaks, 0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.zeros((LANES,), dtype=tl.float32)
    moments = tl.zeros((LANES,), dtype=tl.float32)
    for start in range(0, length, LANES):
        columns = start + lanes
        value = tl.load(source + columns, mask=columns < length, other=float("-inf"))
        distance = tl.div_rn(value, temperature) - shift
        weight = exponential(distance)
        weights += weight
        moments = tl.fma(weight, tl.maximum(distance, _FLOOR), moments)
    target = tl.load(targets + row) - first - part * length
    mine = (target >= 0) & (target < length)
    chosen = tl.load(source + tl.where(mine, target, 0))
    chosen = tl.where(mine, tl.div_rn(chosen, temperature), float("-inf"))
    out = partials + part * 4 * rows + row
    tl.store(out, peak)
    tl.store(out + rows, tl.sum(weights, 0))
    tl.store(out + 2 * rows, tl.sum(moments, 0))
    tl.store(out + 3 * rows, chosen)


@triton.jit
def _subtree(partials, places, inside, rows, first, COUNT: tl.constexpr):
    """(maximum, weight, moment, chosen) of COUNT partials from `first` on."""
    if COUNT == 1:
        source = partials + first * 4 * rows + places
        peak = tl.load(source, mask=inside, other=0.0)
        weight = tl.load(source + rows, mask=inside, other=1.0)
        moment = tl.load(source + 2 * rows, mask=inside, other=0.0)
        chosen = tl.load(source + 3 * rows, mask=inside, other=0.0)
    else:
        half: tl.constexpr = COUNT // 2
        left, left_weight, left_moment, left_chosen = _subtree(
            partials, places, inside, rows, first, half
        )
        right, right_weight, right_moment, right_chosen = _subtree(
            partials, places, inside, rows, first + half, half
        )
        peak = tl.maximum(left, right)
        shift = tl.where(peak == float("-inf"), 0.0, peak)
        left_distance = tl.maximum(left - shift, _FLOOR)
        right_distance = tl.maximum(right - shift, _FLOOR)
        left_factor = exponential(left - shift)
        right_factor = exponential(right - shift)
        weight = left_weight * left_factor + right_weight * right_factor
        left_moment = tl.fma(left_distance, left_weight, left_moment) * left_factor
        right_moment = tl.fma(right_distance, right_weight, right_moment) * right_factor
        moment = left_moment + right_moment
        chosen = tl.maximum(left_chosen, right_chosen)
        # A NaN is nobody's maximum; the side that holds the target passes it on.
        chosen = tl.where(left_chosen == left_chosen, chosen, left_chosen)
        chosen = tl.where(right_chosen == right_chosen, chosen, right_chosen)
    return peak, weight, moment, chosen


@triton.jit
def _join(partials, out, rows, COUNT: tl.constexpr, FINISH: tl.constexpr, TOKENS: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = places < rows
    first = tl.full((), 0, tl.int64)
    peak, weight, moment, chosen = _subtree(partials, places, inside, rows, first, COUNT)
    target = out + places
    if FINISH:
        logarithm = tl.log(weight.to(tl.float64))
        logprob = chosen.to(tl.float64) - peak.to(tl.float64) - logarithm
        entropy = logarithm - moment.to(tl.float64) / weight.to(tl.float64)
        tl.store(target, logprob.to(tl.float32), mask=inside)
        tl.store(target + rows, entropy.to(tl.float32), mask=inside)
        tl.store(target + 2 * rows, peak, mask=inside)
        tl.store(target + 3 * rows, weight, mask=inside)
    else:
        tl.store(target, peak, mask=inside)
        tl.store(target + rows, weight, mask=inside)
        tl.store(target + 2 * rows, moment, mask=inside)
        tl.store(target + 3 * rows, chosen, mask=inside)


@triton.jit
def _gradient_block(
    logits,
    targets,
    peaks,
    weights,
    entropies,
    grad_logprobs,
    grad_entropies,
    row_stride,
    width,
    first,
    temperature,
    BLOCK: tl.constexpr,
):
    """g_logprob (onehot - p) - g_entropy p (log p + entropy), over the temperature, in place."""
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    weight = tl.load(weights + row)
    grad_logprob = tl.load(grad_logprobs + row)
    grad_entropy = tl.load(grad_entropies + row)
    offset = tl.load(entropies + row).to(tl.float64) - tl.log(weight.to(tl.float64))
    value = tl.load(logits + row * row_stride + columns, mask=inside, other=0.0)
    distance = tl.div_rn(value, temperature) - tl.load(peaks + row)
    probability = tl.div_rn(exponential(distance), weight)
    logarithm = tl.maximum(distance, _FLOOR) + offset.to(tl.float32)
    result = probability * (-grad_entropy * logarithm - grad_logprob)
    result += tl.where(columns == tl.load(targets + row) - first, grad_logprob, 0.0)
    # A row that is not part of the loss has no gradient, even where its logits are not finite.
    result = tl.where((grad_logprob == 0.0) & (grad_entropy == 0.0), 0.0, result)
    tl.store(logits + row * row_stride + columns, tl.div_rn(result, temperature), mask=inside)


def partial(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, *, first: int, parts: int
) -> torch.Tensor:
    """The four numbers of each part: fp32 [parts, 4, T]; see `lm_head_partial`."""
    rows, width = logits.shape
    partials = torch.empty((parts, 4, rows), dtype=torch.float32, device=logits.device)
    launch(
        _part_statistics,
        rows * parts,
        logits,
        targets,
        partials,
        *(logits.stride(0), rows, width, parts, first, float(temperature)),
        on=logits,
        LANES=_LANES,
    )
    return partials


def join(partials: torch.Tensor, *, finish: bool) -> torch.Tensor:
    """Joins [R, 4, T]: the four numbers of the whole, or (logprob, entropy, maximum, weight)."""
    count, _, rows = partials.shape
    out = torch.empty((4, rows), dtype=torch.float32, device=partials.device)
    launch(
        _join,
        blocks_of(rows, _TOKENS),
        partials,
        out,
        rows,
        on=partials,
        warps=1,
        COUNT=count,
        FINISH=finish,
        TOKENS=_TOKENS,
    )
    return out


def gradient(
    logits: torch.Tensor,
    first: int,
    targets: torch.Tensor,
    temperature: float,
    statistics: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """Turns columns [first, first + width) of the logits, in place, into their gradient."""
    rows, width = logits.shape
    launch(
        _gradient_block,
        rows * blocks_of(width, _BLOCK),
        logits,
        targets,
        *statistics,
        *(logits.stride(0), width, first, float(temperature)),
        on=logits,
        BLOCK=_BLOCK,
    )
    return logits
