# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false
# The body of a kernel is written in Triton's language, whose types are not those of Python.
"""The permutation of a mixture of experts on a GPU; see `consistency.kernels.moe`.

Order of reduction:
    The outputs of a token's experts are combined in slot order by fused multiply-adds in fp32 and
    rounded once; a dot product folds as `rows` states. The sort is stable, on integers, and decides
    no bit of a result. No atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistency.kernels.triton.launch import blocks_of, launch
from consistency.kernels.triton.rows import lanes_of, warps_of
from consistency.kernels.triton.tile import rounded

_COLUMNS = 512


@triton.jit(do_not_specialize=["slots"])
def _dispatch(x, place, out, slots, width, COLUMNS: tl.constexpr):
    blocks = tl.cdiv(width, COLUMNS)
    pair = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    value = tl.load(x + pair // slots * width + columns, mask=inside, other=0.0)
    tl.store(out + tl.load(place + pair) * width + columns, value, mask=inside)


@triton.jit(do_not_specialize=["slots"])
def _combine(y, place, weights, out, slots, width, WEIGHTED: tl.constexpr, COLUMNS: tl.constexpr):
    blocks = tl.cdiv(width, COLUMNS)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for slot in range(slots):
        pair = token * slots + slot
        source = y + tl.load(place + pair) * width + columns
        value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            total = tl.fma(tl.load(weights + pair), value, total)
        else:
            total += value
    tl.store(out + token * width + columns, rounded(total, out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["slots"])
def _combine_backward(
    grad, y, place, weights, grad_y, grad_weights, slots, width, LANES: tl.constexpr
):
    pair = tl.program_id(0).to(tl.int64)
    row = tl.load(place + pair) * width
    outer = grad + pair // slots * width
    weight = tl.load(weights + pair)
    lanes = tl.arange(0, LANES)
    products = tl.zeros((LANES,), dtype=tl.float32)
    for start in range(0, width, LANES):
        columns = start + lanes
        inside = columns < width
        g = tl.load(outer + columns, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(y + row + columns, mask=inside, other=0.0).to(tl.float32)
        products = tl.fma(g, value, products)
        tl.store(grad_y + row + columns, rounded(weight * g, grad_y.dtype.element_ty), mask=inside)
    tl.store(grad_weights + pair, tl.sum(products, 0))


def sort_by_expert(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Stable sort of the pairs (token, slot) by expert: each pair's place, each expert's offset."""
    ordered, pairs = torch.sort(ids.reshape(-1), stable=True)
    place = torch.empty_like(pairs)
    place[pairs] = torch.arange(pairs.numel(), device=ids.device)
    bounds = torch.arange(experts + 1, device=ids.device)
    return place.view(ids.shape), torch.searchsorted(ordered, bounds)


def dispatch(x: torch.Tensor, place: torch.Tensor, slots: int) -> torch.Tensor:
    """Copies row t of contiguous x [T, H] to the places of token t: [T * slots, H]."""
    rows = x.new_empty((x.shape[0] * slots, x.shape[1]))
    launch(
        _dispatch,
        rows.shape[0] * blocks_of(x.shape[1], _COLUMNS),
        x,
        place,
        rows,
        *(slots, x.shape[1]),
        on=x,
        COLUMNS=_COLUMNS,
    )
    return rows


def combine(
    y: torch.Tensor, place: torch.Tensor, weights: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """out[t] = sum over s, in order, of weights[t, s] y[place[t, s]]; no weights: a plain sum."""
    tokens, slots = place.shape
    out = torch.empty((tokens, y.shape[1]), dtype=dtype, device=y.device)
    launch(
        _combine,
        tokens * blocks_of(y.shape[1], _COLUMNS),
        y,
        place,
        y if weights is None else weights,
        out,
        *(slots, y.shape[1]),
        on=y,
        WEIGHTED=weights is not None,
        COLUMNS=_COLUMNS,
    )
    return out


def combine_backward(
    grad: torch.Tensor, y: torch.Tensor, place: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dy, dweights) of `combine` with weights."""
    grad_y, grad_weights = torch.empty_like(y), torch.empty_like(weights)
    width = y.shape[1]
    launch(
        _combine_backward,
        place.numel(),
        grad,
        y,
        place,
        weights,
        grad_y,
        grad_weights,
        *(place.shape[1], width),
        on=grad,
        warps=warps_of(width),
        LANES=lanes_of(width),
    )
    return grad_y, grad_weights
