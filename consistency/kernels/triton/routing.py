# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false
# The body of a kernel is written in Triton's language, whose types are not those of Python.
"""top_k and the router on a GPU; see `consistency.kernels.top_k` and `consistency.kernels.route`.

Order of reduction:
    top_k has none: the order (value descending, index ascending) is total. The sum of a token's
    weights, and the sums of its gradient, run in slot order. No atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistency.kernels.triton import softmax
from consistency.kernels.triton.launch import launch, power_of_two

# Up to here a row lives in the registers of one program; longer ones are sorted.
_WIDEST = 8192
_MOST_TAKEN = 64


@triton.jit
def _take_best(scores, values, ids, width, k, LANES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    score = tl.load(scores + row * width + lanes, mask=lanes < width, other=float("-inf"))
    alive = lanes < width
    for slot in range(k):
        best = tl.max(tl.where(alive, score, float("-inf")), 0)
        place = tl.min(tl.where(alive & (score == best), lanes, LANES), 0)
        place = tl.minimum(place, width - 1)
        alive = alive & (lanes != place)
        tl.store(values + row * k + slot, best)
        tl.store(ids + row * k + slot, place.to(tl.int64))


@triton.jit
def _weigh(
    probabilities, ids, weights, faults, experts, k, NORMALISE: tl.constexpr, SLOTS: tl.constexpr
):
    """faults: -1, or 0 an id out of range, 1 an id twice, 2 a sum of zero, 3 no softmax."""
    row = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, SLOTS)
    used = slots < k
    id = tl.load(ids + row * k + slots, mask=used, other=0)
    bad = used & ((id < 0) | (id >= experts))
    id = tl.where(bad, 0, id)
    other = tl.where(used, id, -1 - slots)
    same = (other[:, None] == other[None, :]) & (slots[:, None] < slots[None, :])
    probability = tl.load(probabilities + row * experts + id, mask=used, other=0.0)
    total = tl.full((), 0.0, dtype=tl.float32)
    if NORMALISE:
        for slot in range(k):
            total += tl.sum(tl.where(slots == slot, probability, 0.0), 0)
        probability = tl.div_rn(probability, total)
    tl.store(weights + row * k + slots, probability, mask=used)
    first = tl.load(probabilities + row * experts)
    fault = tl.full((), -1, dtype=tl.int32)
    if NORMALISE:
        fault = tl.where(total == 0.0, 2, fault)
    fault = tl.where(tl.max(tl.max(same.to(tl.int32), 1), 0) > 0, 1, fault)
    fault = tl.where(tl.max(bad.to(tl.int32), 0) > 0, 0, fault)
    fault = tl.where(first != first, 3, fault)
    tl.store(faults + row, fault)


@triton.jit
def _route_backward(
    grad, probabilities, ids, grad_logits, experts, k, NORMALISE: tl.constexpr, LANES: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    inside = lanes < experts
    source = probabilities + row * experts
    selected = tl.full((), 1.0, dtype=tl.float32)
    projection = tl.full((), 0.0, dtype=tl.float32)
    if NORMALISE:
        selected = tl.full((), 0.0, dtype=tl.float32)
        for slot in range(k):
            selected += tl.load(source + tl.load(ids + row * k + slot))
        for slot in range(k):
            share = tl.div_rn(tl.load(source + tl.load(ids + row * k + slot)), selected)
            projection = tl.fma(tl.load(grad + row * k + slot), share, projection)
    slope = tl.zeros((LANES,), dtype=tl.float32)
    total = tl.full((), 0.0, dtype=tl.float32)
    for slot in range(k):
        id = tl.load(ids + row * k + slot)
        value = tl.div_rn(tl.load(grad + row * k + slot) - projection, selected)
        slope = tl.where(lanes == id, value, slope)
        total = tl.fma(value, tl.load(source + id), total)
    probability = tl.load(source + lanes, mask=inside, other=0.0)
    tl.store(grad_logits + row * experts + lanes, probability * (slope - total), mask=inside)


def top_k(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(values fp32, ids int64), each [T, k], of contiguous fp32 scores [T, E] without NaN."""
    rows, width = scores.shape
    if width > _WIDEST or k > _MOST_TAKEN:
        values, ids = torch.sort(scores, dim=1, descending=True, stable=True)
        return values[:, :k].contiguous(), ids[:, :k].contiguous()
    values = scores.new_empty((rows, k))
    ids = torch.empty((rows, k), dtype=torch.int64, device=scores.device)
    launch(
        _take_best,
        rows if k else 0,
        scores,
        values,
        ids,
        *(width, k),
        on=scores,
        warps=1 if width <= 512 else 4,
        LANES=power_of_two(width),
    )
    return values, ids


def route(
    logits: torch.Tensor, k: int, normalise: bool, replay_ids: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(weights, ids, probabilities, faults [T] int32) of contiguous fp32 logits [T, E]."""
    probabilities = softmax.forward(logits, False)
    ids = top_k(probabilities, k)[1] if replay_ids is None else replay_ids
    weights = torch.empty(ids.shape, dtype=torch.float32, device=logits.device)
    faults = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    launch(
        _weigh,
        logits.shape[0],
        probabilities,
        ids,
        weights,
        faults,
        *(logits.shape[1], k),
        on=logits,
        warps=1,
        NORMALISE=normalise,
        SLOTS=power_of_two(k),
    )
    return weights, ids, probabilities, faults


def route_backward(
    grad: torch.Tensor, probabilities: torch.Tensor, ids: torch.Tensor, normalise: bool
) -> torch.Tensor:
    """The gradient of the router's logits, fp32 [T, E]."""
    grad_logits = torch.empty_like(probabilities)
    tokens, experts = probabilities.shape
    launch(
        _route_backward,
        tokens,
        grad,
        probabilities,
        ids,
        grad_logits,
        *(experts, ids.shape[1]),
        on=grad,
        warps=1 if experts <= 512 else 4,
        NORMALISE=normalise,
        LANES=power_of_two(experts),
    )
    return grad_logits
