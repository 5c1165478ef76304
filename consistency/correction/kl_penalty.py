"""KL penalty against a reference policy, per token, with a gradient."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from consistency.correction.limits import require_cap
from consistency.errors import InvalidInputError
from consistency.estimators import k1, k2, k3
from consistency.token_layout import TokenLayout


def kl_penalty(
    lp: Tensor,
    lp_ref: Tensor,
    mask: Tensor | None = None,
    *,
    estimator: Literal["k1", "k2", "k3"] = "k3",
    limit: float = 10.0,
    lp_old: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Estimate of KL(policy || reference) at each sampled token; with d = lp - lp_ref:

        k1 = d      k2 = d^2 / 2      k3 = e^-d - 1 + d

    As a loss, k2 on on-policy samples has the gradient of the KL itself. k1's gradient is zero in
    expectation, so it belongs in the reward, not in the loss. k3's is unbiased only with the
    importance ratio inside the gradient: pass ``lp_old`` for that form (DeepSeek-V3.2), ratio * k3.

    Args:
        lp: log-probabilities under the weights being trained, fp32 ``[B, T]`` or packed ``[T]``,
            with gradient.
        lp_ref: under the reference, same shape; detached here.
        mask: loss mask, same shape; None = every token.
        estimator: ``k1``, ``k2`` or ``k3``.
        limit: the estimate is clamped to +-limit.
        lp_old: under the policy that the samples come from: multiplies by exp(lp - lp_old), not
            detached.
        cu_seqlens: int ``[S + 1]``, cuts a packed batch.

    Returns:
        The batch's shape, 0 outside the mask.

    Raises:
        InvalidInputError: shapes that do not fit, or a missing log-probability under the mask.
    """
    require_cap("limit", limit)
    estimators = {"k1": k1, "k2": k2, "k3": k3}
    if estimator not in estimators:
        raise InvalidInputError(f"estimator is {estimator!r}: use 'k1', 'k2' or 'k3'")
    layout = TokenLayout.of(lp, mask, cu_seqlens)
    log_ratio = layout.log_ratio(("lp_ref", lp_ref.detach()), ("lp", lp))
    penalty = estimators[estimator](log_ratio).clamp(-limit, limit)
    if lp_old is not None:
        penalty = penalty * layout.log_ratio(("lp", lp), ("lp_old", lp_old.detach())).exp()
    return layout.select(penalty)
