# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false
# The body of a kernel is written in Triton's language, whose types are not those of Python.
"""Seeded Gumbel sampling on a GPU; the public function is in `consistency.kernels.sampling`.

Order of reduction:
    None: of equal scores the lowest index wins. The noise of an entry is a function of (seed,
    position, index): neither the batch nor the row's place in it enters.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistency.kernels.triton.launch import launch

_COUNTERS = 256


@triton.jit
def _gumbel(word):
    """-log(-log(1 - w)) with w = (word + 1/2) / 2^32, clamped below 1."""
    high = (word >> 16).to(tl.int32).to(tl.float32)
    low = (word & 0xFFFF).to(tl.int32).to(tl.float32) + 0.5
    w = tl.minimum(high * 1.52587890625e-5 + low * 2.3283064365386963e-10, 0.99999994)
    t = 1.0 - w
    dropped = (t - 1.0) + w
    return -tl.log(tl.div_rn(dropped, t) - tl.log(t))


@triton.jit
def _consider(logits, width, index, noise, peak, temperature, best, place):
    """The better of (best, place) and the scores at `index`, lane by lane; ties to the earlier."""
    value = tl.load(logits + index, mask=index < width, other=float("-inf"))
    distance = tl.where(value == peak, 0.0, value - peak)
    score = tl.where(temperature > 0.0, tl.div_rn(distance, temperature) + noise, distance)
    better = score > best
    return tl.where(better, score, best), tl.where(better, index, place)


@triton.jit
def _sample_row(
    logits, temperatures, seeds, positions, tokens, faults, width, COUNTERS: tl.constexpr
):
    """faults: -1, or 0 a NaN logit, 1 no logit above -inf, 2 a bad temperature."""
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * width
    counters = tl.arange(0, COUNTERS)
    draws: tl.constexpr = 4 * COUNTERS
    lanes = tl.arange(0, draws)
    peaks = tl.full((draws,), float("-inf"), dtype=tl.float32)
    broken = tl.zeros((draws,), dtype=tl.int32)
    for start in range(0, width, draws):
        value = tl.load(source + start + lanes, mask=start + lanes < width, other=float("-inf"))
        peaks = tl.maximum(peaks, value)
        broken = tl.where(value == value, broken, 1)
    peak = tl.max(peaks, 0)
    temperature = tl.load(temperatures + row)
    divisor = tl.where(temperature > 0.0, temperature, 1.0)
    seed = tl.load(seeds + row)
    position = tl.load(positions + row)
    zero = tl.zeros((COUNTERS,), dtype=tl.uint32)
    low = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    high = zero + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    best = tl.full((COUNTERS,), float("-inf"), dtype=tl.float32)
    place = tl.zeros((COUNTERS,), dtype=tl.int32)
    for start in range(0, width, draws):
        counter = start // 4 + counters
        first = counter // 16 * 64 + counter % 16
        one, two, three, four = tl.philox(seed, counter.to(tl.uint32), low, high, zero)
        scale = tl.where(temperature > 0.0, divisor, 0.0)
        best, place = _consider(source, width, first, _gumbel(one), peak, scale, best, place)
        best, place = _consider(source, width, first + 16, _gumbel(two), peak, scale, best, place)
        best, place = _consider(source, width, first + 32, _gumbel(three), peak, scale, best, place)
        best, place = _consider(source, width, first + 48, _gumbel(four), peak, scale, best, place)
    winner = tl.max(best, 0)
    token = tl.min(tl.where(best == winner, place, 0x7FFFFFFF), 0)
    tl.store(tokens + row, tl.minimum(token, width - 1).to(tl.int64))
    fault = tl.full((), -1, dtype=tl.int32)
    good = (temperature >= 0.0) & (temperature < float("inf"))
    fault = tl.where(good, fault, 2)
    fault = tl.where(peak == float("-inf"), 1, fault)
    fault = tl.where(tl.max(broken, 0) > 0, 0, fault)
    tl.store(faults + row, fault)


def sample(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids int64 [T], faults int32 [T]) of contiguous fp32 logits [T, V]."""
    rows, width = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    faults = torch.empty(rows, dtype=torch.int32, device=logits.device)
    launch(
        _sample_row,
        rows,
        logits,
        temperature,
        seeds,
        positions,
        tokens,
        faults,
        width,
        on=logits,
        COUNTERS=_COUNTERS,
    )
    return tokens, faults
