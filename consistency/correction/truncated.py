"""Truncated importance sampling (TIS): weights with an upper limit, nothing is dropped."""

from __future__ import annotations

import torch
from torch import Tensor

from consistency.correction.limits import require_cap
from consistency.correction.ratios import sequence_log_ratio
from consistency.correction.record import Correction
from consistency.token_layout import TokenLayout


def token_tis(
    lp_old: Tensor,
    lp_roll: Tensor,
    mask: Tensor | None = None,
    *,
    limit: float = 2.0,
    normalise: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Correction:
    """w_t = min(exp(lp_old_t - lp_roll_t), limit).

    Args:
        lp_old: the learner's log-probabilities before the update, fp32 ``[B, T]`` or packed
            ``[T]``.
        lp_roll: the rollout engine's, same shape.
        mask: loss mask, same shape, bool or 0/1; None = every token.
        limit: truncation C, > 0; inf for none.
        normalise: divide by the mean weight over the counted tokens, after truncation.
        cu_seqlens: int ``[S + 1]``, cuts a packed batch.

    Returns:
        Correction: detached weights, the loss mask unchanged.

    Raises:
        InvalidInputError: bad shapes or limits, or a missing log-probability under the mask.
    """
    require_cap("limit", limit)
    layout = TokenLayout.of(lp_old, mask, cu_seqlens)
    ratio = layout.log_ratio(("lp_old", lp_old.detach()), ("lp_roll", lp_roll.detach())).exp()
    weight = ratio.clamp(max=limit)
    if normalise:
        weight = _divide_by_mean(weight, layout.mask)
    return Correction.of(weight, layout.mask, layout, truncated=ratio > limit)


def sequence_tis(
    lp_old: Tensor,
    lp_roll: Tensor,
    mask: Tensor | None = None,
    *,
    limit: float = 2.0,
    normalise: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Correction:
    """w_i = min(prod_t exp(lp_old_t - lp_roll_t), limit), the same for every token of sequence i.

    Args:
        lp_old, lp_roll, mask, limit, cu_seqlens: as in `token_tis`.
        normalise: divide by the mean weight over the sequences that have counted tokens.

    Returns:
        Correction: detached weights, the loss mask unchanged.
    """
    require_cap("limit", limit)
    layout = TokenLayout.of(lp_old, mask, cu_seqlens)
    log_ratio = layout.log_ratio(("lp_old", lp_old.detach()), ("lp_roll", lp_roll.detach()))
    ratio = sequence_log_ratio(log_ratio, layout, "product").exp()
    weight = ratio.clamp(max=limit)
    if normalise:
        weight = _divide_by_mean(weight, layout.counts() > 0)
    return Correction.of(
        layout.spread(weight), layout.mask, layout, truncated=layout.spread(ratio > limit)
    )


def _divide_by_mean(weight: Tensor, counted: Tensor) -> Tensor:
    """Skipped when there is nothing to average or the mean is too small to divide by."""
    total = torch.where(counted, weight, torch.zeros_like(weight)).to(torch.float64).sum()
    mean = float(total) / max(int(counted.sum()), 1)
    return weight / mean if mean > 1e-8 else weight
