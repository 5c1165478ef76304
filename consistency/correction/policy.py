"""The clipped policy loss of PPO and GRPO, decoupled from the correction of the mismatch.

    loss_t = -w_t * min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t)

rho is the ratio to the policy at the start of the update; w, the correction for what the rollout
engine did differently, stays outside the clip. Source: AReaL, arXiv 2505.24298.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from consistency.correction.ratios import gspo_token_ratio
from consistency.correction.record import Correction
from consistency.errors import InvalidInputError
from consistency.token_layout import TokenLayout


@dataclass(frozen=True, slots=True, eq=False)
class PolicyLoss:
    """Per-token policy loss and what clipping did.

    Args:
        per_token: fp32 (fp64 for fp64 inputs), the batch's shape, carries the gradient; 0 outside
            the mask and on tokens that the correction drops. Hand it to `aggregate`.
        clip_fraction: share of the counted tokens whose gradient the clip removed.
        dual_clip_fraction: share of the counted tokens cut by the dual clip.
    """

    per_token: Tensor
    clip_fraction: float
    dual_clip_fraction: float


def policy_loss(
    lp: Tensor,
    lp_old: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    ratio: Literal["token", "gspo"] = "token",
    correction: Correction | None = None,
    cu_seqlens: Tensor | None = None,
) -> PolicyLoss:
    """Clipped surrogate per token, negated.

    Args:
        lp: log-probabilities under the weights being trained, fp32 ``[B, T]`` or packed ``[T]``,
            with gradient.
        lp_old: under the weights at the start of the update, same shape. When it is the rollout
            engine's own (bypass mode), pass no ``correction``: the mismatch is in the ratio
            already.
        advantages: ``[S]``, one per sequence, or the shape of ``lp``; used detached.
        mask: loss mask, same shape as ``lp``, bool or 0/1; None = every token.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high]. Clip-higher
            (DAPO): 0.2 and 0.28. GSPO: 3e-4 and 4e-4.
        dual_clip: c > 1: for A < 0 the loss is at most c |A|; None = off.
        ratio: ``token``, or ``gspo``: the sequence's geometric mean, with GSPO-token's gradient.
        correction: weights and mask for the rollout mismatch; None = weight 1.
        cu_seqlens: int ``[S + 1]``, cuts a packed batch.

    Returns:
        PolicyLoss. Aggregate with the *original* mask and ``kept=correction.mask``.

    Raises:
        InvalidInputError: shapes or limits that do not fit, or a missing log-probability under the
            mask.
    """
    _require_clip(clip_low, clip_high, dual_clip)
    layout = TokenLayout.of(lp, mask, cu_seqlens)
    advantage = _per_token_advantage(advantages, layout)
    old = lp_old.detach()
    if ratio == "token":
        rho = layout.log_ratio(("lp", lp), ("lp_old", old)).exp()
    elif ratio == "gspo":
        rho = gspo_token_ratio(lp, old, layout.mask, cu_seqlens=cu_seqlens)
    else:
        raise InvalidInputError(f"ratio is {ratio!r}: use 'token' or 'gspo'")
    advantage = advantage.to(rho.dtype)
    free = -rho * advantage
    clipped = -rho.clamp(1.0 - clip_low, 1.0 + clip_high) * advantage
    # torch.maximum would hand half of the gradient to each side of a tie, and inside the clip range
    # the two sides always tie; where() leaves a tie to the unclipped side alone.
    was_clipped = clipped > free
    loss = torch.where(was_clipped, clipped, free)
    was_dual_clipped = torch.zeros_like(layout.mask)
    if dual_clip is not None:
        ceiling = dual_clip * advantage.abs()
        was_dual_clipped = (advantage < 0) & (loss > ceiling)
        loss = torch.where(was_dual_clipped, ceiling, loss)
    if correction is not None:
        if correction.mask.shape != layout.mask.shape:
            raise InvalidInputError(
                f"correction is {list(correction.mask.shape)}: use one made from this batch, "
                f"{list(layout.mask.shape)}"
            )
        loss = loss * correction.weight.to(loss.dtype)
    total = max(int(layout.mask.sum()), 1)
    return PolicyLoss(
        per_token=layout.select(loss),
        clip_fraction=int((layout.mask & was_clipped).sum()) / total,
        dual_clip_fraction=int((layout.mask & was_dual_clipped).sum()) / total,
    )


def _per_token_advantage(advantages: Tensor, layout: TokenLayout) -> Tensor:
    detached = advantages.detach()
    if detached.shape == layout.mask.shape:
        spread = detached
    elif detached.shape == (layout.sequences,):
        spread = layout.spread(detached)
    else:
        raise InvalidInputError(
            f"advantages is {list(detached.shape)}: use one per sequence, [{layout.sequences}], "
            f"or one per token, {list(layout.mask.shape)}"
        )
    if bool((layout.mask & ~torch.isfinite(spread)).any()):
        raise InvalidInputError("advantages holds a value that is not finite under the mask")
    return layout.select(spread)


def _require_clip(clip_low: float, clip_high: float, dual_clip: float | None) -> None:
    # clip_low above 1 is legal: it is how public recipes switch the lower limit off.
    if not clip_low >= 0 or not clip_high >= 0:
        raise InvalidInputError(
            f"clip_low is {clip_low}, clip_high is {clip_high}: use numbers >= 0"
        )
    if dual_clip is not None and not dual_clip > 1:
        raise InvalidInputError(f"dual_clip is {dual_clip}: use a number above 1, or None")
