"""Masks: tokens or sequences whose mismatch is too large leave the loss.

Every interval is on the ratio r = exp(lp_old - lp_roll), both ends inclusive. (verl's k1 options
state limits on r but test them on -log r, which accepts 1/r instead; the two differ unless the
limits are reciprocal.)
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from consistency.correction.limits import log_or_infinity, require_cap, require_interval
from consistency.correction.ratios import sequence_log_ratio
from consistency.correction.record import Correction
from consistency.errors import InvalidInputError
from consistency.estimators import k2, k3
from consistency.token_layout import TokenLayout

RatioLevel = Literal["token", "sequence", "geometric"]
DivergenceLevel = Literal["token", "sequence_sum", "sequence_mean", "sequence_max"]


def ratio_mask(
    lp_old: Tensor,
    lp_roll: Tensor,
    mask: Tensor | None = None,
    *,
    level: RatioLevel = "token",
    low: float = 0.5,
    high: float = 2.0,
    veto: float | None = None,
    weighted: bool = True,
    cu_seqlens: Tensor | None = None,
) -> Correction:
    """Masked importance sampling (MIS): keep iff low <= r <= high; what is kept keeps its weight r.

    Args:
        lp_old, lp_roll, mask, cu_seqlens: as in `token_tis`.
        level: r is a token's ratio, a sequence's product, or a sequence's geometric mean.
        low, high: limits of r, inclusive.
        veto: drop the whole sequence if any of its tokens has a ratio below this (1e-4 is usual).
            It looks at raw ratios, before any clamp.
        weighted: weight kept tokens by r; False gives plain rejection with weight 1.

    Returns:
        Correction: detached weights and the tokens that stay.

    Raises:
        InvalidInputError: bad shapes or limits, or a missing log-probability under the mask.
    """
    require_interval(low, high)
    layout = TokenLayout.of(lp_old, mask, cu_seqlens)
    pair = ("lp_old", lp_old.detach()), ("lp_roll", lp_roll.detach())
    log_ratio = layout.log_ratio(*pair)
    if level == "token":
        log_weight = log_ratio
    elif level == "sequence":
        log_weight = layout.spread(sequence_log_ratio(log_ratio, layout, "product"))
    elif level == "geometric":
        log_weight = layout.spread(sequence_log_ratio(log_ratio, layout, "geometric"))
    else:
        raise InvalidInputError(f"level is {level!r}: use 'token', 'sequence' or 'geometric'")
    kept = (log_weight >= log_or_infinity(low)) & (log_weight <= log_or_infinity(high))
    if veto is not None:
        lowest = log_or_infinity(require_cap("veto", veto))
        raw = layout.log_ratio(*pair, clamp=False)
        kept = kept & layout.spread(-layout.maximum(-raw) >= lowest)
    weight = log_weight.exp() if weighted else torch.ones_like(log_weight)
    return Correction.of(weight, kept, layout)


def divergence_mask(
    lp_old: Tensor,
    lp_roll: Tensor,
    mask: Tensor | None = None,
    *,
    estimator: Literal["k2", "k3"] = "k3",
    level: DivergenceLevel = "token",
    limit: float,
    cu_seqlens: Tensor | None = None,
) -> Correction:
    """Keep iff the estimated KL(rollout || learner) of the token or sequence is <= limit; weight 1.

    Args:
        lp_old, lp_roll, mask, cu_seqlens: as in `token_tis`.
        estimator: ``k2`` = d^2 / 2 or ``k3`` = r - 1 - d, with d = lp_old - lp_roll.
        level: per token, or the sum, mean or maximum over each sequence.
        limit: upper limit, inclusive.

    Returns:
        Correction: weight 1 on the tokens that stay.
    """
    require_cap("limit", limit)
    if estimator not in ("k2", "k3"):
        raise InvalidInputError(f"estimator is {estimator!r}: use 'k2' or 'k3'")
    layout = TokenLayout.of(lp_old, mask, cu_seqlens)
    log_ratio = layout.log_ratio(("lp_old", lp_old.detach()), ("lp_roll", lp_roll.detach()))
    divergence = k2(log_ratio) if estimator == "k2" else k3(log_ratio)
    if level == "token":
        kept = divergence <= limit
    elif level == "sequence_sum":
        kept = layout.spread(layout.sum(divergence) <= limit)
    elif level == "sequence_mean":
        kept = layout.spread(layout.mean(divergence) <= limit)
    elif level == "sequence_max":
        kept = layout.spread(layout.maximum(divergence) <= limit)
    else:
        raise InvalidInputError(
            f"level is {level!r}: use 'token', 'sequence_sum', 'sequence_mean' or 'sequence_max'"
        )
    return Correction.of(torch.ones_like(log_ratio), kept, layout)


def off_policy_sequence_mask(
    lp: Tensor,
    lp_old: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    limit: float = 1e-4,
    cu_seqlens: Tensor | None = None,
) -> Correction:
    """OPSM: drop sequence i iff its advantage is negative and mean_t(lp_old - lp) > limit.

    Args:
        lp: log-probabilities of the current policy, ``[B, T]`` or packed ``[T]``.
        lp_old: of the policy that the samples come from, same shape.
        advantages: ``[S]``, one per sequence.
        mask, cu_seqlens: as in `token_tis`.
        limit: largest mean log-ratio that a negative sequence may have.

    Returns:
        Correction: weight 1 on the tokens that stay.
    """
    layout = TokenLayout.of(lp, mask, cu_seqlens)
    if advantages.shape != (layout.sequences,):
        raise InvalidInputError(
            f"advantages is {list(advantages.shape)}: use one per sequence, [{layout.sequences}]"
        )
    gap = layout.log_ratio(("lp_old", lp_old.detach()), ("lp", lp.detach()))
    kept = layout.spread(~((advantages < 0) & (layout.mean(gap) > limit)))
    return Correction.of(torch.ones_like(gap), kept, layout)
