"""IcePop: a mask and an importance weight in one.

Source: Ring-1T, arXiv 2510.18855.
"""

from __future__ import annotations

from torch import Tensor

from consistency.correction.limits import log_or_infinity, require_interval
from consistency.correction.record import Correction
from consistency.token_layout import TokenLayout


def icepop(
    lp_old: Tensor,
    lp_roll: Tensor,
    mask: Tensor | None = None,
    *,
    low: float = 0.5,
    high: float = 5.0,
    cu_seqlens: Tensor | None = None,
) -> Correction:
    """M(k) = k if low <= k <= high else 0, with k_t = exp(lp_old_t - lp_roll_t).

    M multiplies the clipped surrogate, so that a kept token is an importance-sampling estimate and
    a token outside the limits contributes nothing. In the paper dropped tokens stay in the
    denominator: aggregate with ``denominator="original"``, the default.

    Args:
        lp_old: the learner's log-probabilities before the update, fp32 ``[B, T]`` or packed
            ``[T]``.
        lp_roll: the rollout engine's, same shape.
        mask: loss mask, same shape, bool or 0/1; None = every token.
        low, high: limits alpha and beta, inclusive; 0 and inf give uncapped decoupled PPO.
        cu_seqlens: int ``[S + 1]``, cuts a packed batch.

    Returns:
        Correction: detached weights and the tokens that stay.

    Raises:
        InvalidInputError: bad shapes or limits, or a missing log-probability under the mask.
    """
    require_interval(low, high)
    layout = TokenLayout.of(lp_old, mask, cu_seqlens)
    log_ratio = layout.log_ratio(("lp_old", lp_old.detach()), ("lp_roll", lp_roll.detach()))
    kept = (log_ratio >= log_or_infinity(low)) & (log_ratio <= log_or_infinity(high))
    return Correction.of(log_ratio.exp(), kept, layout)
