"""Importance ratios between two policies, per token and per sequence.

Any ratio between the current policy and the rollout engine splits into two:

    exp(lp - lp_roll) = exp(lp_old - lp_roll) * exp(lp - lp_old)
                        mismatch of the engines  staleness of the weights
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from consistency.errors import InvalidInputError
from consistency.token_layout import LOG_RATIO_LIMIT, TokenLayout

SequenceRatio = Literal["product", "geometric"]


def token_ratio(
    numerator: Tensor,
    denominator: Tensor,
    mask: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """rho_t = exp(numerator_t - denominator_t).

    Args:
        numerator: log-probabilities fp32, ``[B, T]`` or packed ``[T]``; may carry a gradient.
        denominator: same shape.
        mask: same shape, bool or 0/1; None = every token.
        cu_seqlens: cuts a packed batch; not needed for this ratio, checked if given.

    Returns:
        Same shape, 1 where the mask is 0. The log-ratio is clamped to +-20 first.

    Raises:
        InvalidInputError: shapes that do not fit, or a missing log-probability under the mask.
    """
    layout = TokenLayout.of(numerator, mask, cu_seqlens)
    return layout.log_ratio(("numerator", numerator), ("denominator", denominator)).exp()


def sequence_ratio(
    numerator: Tensor,
    denominator: Tensor,
    mask: Tensor | None = None,
    *,
    kind: SequenceRatio = "product",
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Ratio of whole sequences: exp(sum_t d_t) (product) or exp(mean_t d_t) (geometric, as in
    GSPO).

    Args:
        numerator, denominator, mask, cu_seqlens: as in `token_ratio`.
        kind: ``product`` or ``geometric``.

    Returns:
        ``[S]``: one ratio per sequence, 1 for a sequence without counted tokens. Differentiable.
    """
    layout = TokenLayout.of(numerator, mask, cu_seqlens)
    log_ratio = layout.log_ratio(("numerator", numerator), ("denominator", denominator))
    return sequence_log_ratio(log_ratio, layout, kind).exp()


def gspo_token_ratio(
    numerator: Tensor,
    denominator: Tensor,
    mask: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """GSPO-token: sg(s_i) * exp(lp_t - sg(lp_t)); the value of s_i, the gradient of token t alone.

    Args:
        numerator, denominator, mask, cu_seqlens: as in `token_ratio`.

    Returns:
        The batch's shape, 1 where the mask is 0.
    """
    layout = TokenLayout.of(numerator, mask, cu_seqlens)
    log_ratio = layout.log_ratio(("numerator", numerator), ("denominator", denominator))
    sequence = layout.spread(sequence_log_ratio(log_ratio.detach(), layout, "geometric"))
    straight_through = log_ratio - log_ratio.detach()
    return layout.select(sequence + straight_through).exp()


def sequence_log_ratio(log_ratio: Tensor, layout: TokenLayout, kind: SequenceRatio) -> Tensor:
    """Sum or mean over each sequence, clamped again: a sum of thousands of tokens overflows exp."""
    if kind == "product":
        reduced = layout.sum(log_ratio)
    elif kind == "geometric":
        reduced = layout.mean(log_ratio)
    else:
        raise InvalidInputError(f"kind is {kind!r}: use 'product' or 'geometric'")
    return torch.clamp(reduced, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).to(log_ratio.dtype)
