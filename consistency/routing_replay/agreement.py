"""How far two routings agree, and how sure a router is of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from consistency.errors import InvalidInputError
from consistency.routing_replay.expert_ids import require_integer, sortable


def router_flip_rate(
    ids: Tensor, other: Tensor, valid: Tensor | None = None, *, ordered: bool = False
) -> float:
    """Share of (token, layer) pairs that two routings send to different experts.

    Args:
        ids: integer ``[tokens, layers, topk]``.
        other: integer, same shape; the two dtypes may differ.
        valid: bool ``[tokens]``: tokens that count; None = all.
        ordered: compare slot by slot, as weights that follow the slots require; the default
            compares the sets, since the order of the slots alone sends no token elsewhere.

    Returns:
        0 to 1; 0 when nothing counts.

    Raises:
        InvalidInputError: shapes or dtypes that do not fit.
    """
    flips = _flips(ids, other, valid, ordered=ordered)
    return int(flips.sum()) / max(flips.numel(), 1)


def token_flip_rate(
    ids: Tensor, other: Tensor, valid: Tensor | None = None, *, ordered: bool = False
) -> float:
    """Share of tokens that two routings send to different experts in at least one layer.

    Arguments as in `router_flip_rate`.
    """
    flips = _flips(ids, other, valid, ordered=ordered)
    return int(flips.any(dim=1).sum()) / max(flips.shape[0], 1)


def routing_confidence(
    scores: Tensor, topk: int, valid: Tensor | None = None, *, normalise: bool = False
) -> float:
    """Mean probability mass of the experts that a token activates, over tokens and MoE layers.

    Args:
        scores: floating ``[tokens, experts]`` or ``[tokens, layers, experts]``, over all experts:
            softmax scores as they are, or sigmoid scores with ``normalise``.
        topk: experts per token.
        valid: bool ``[tokens]``: tokens that count; None = all.
        normalise: divide by the sum over the experts first (sigmoid routers).

    Returns:
        topk / experts to 1; 0 when nothing counts.

    Raises:
        InvalidInputError: shapes that do not fit, scores that are negative or not finite, or rows
            that do not add up to 1 without ``normalise``.
    """
    if scores.dim() not in (2, 3) or not scores.is_floating_point():
        raise InvalidInputError(
            f"scores is {scores.dtype} {list(scores.shape)}: "
            "use floating [tokens, experts] or [tokens, layers, experts]"
        )
    if not 1 <= topk <= scores.shape[-1]:
        raise InvalidInputError(f"topk is {topk}: use 1 to the {scores.shape[-1]} experts")
    probabilities = scores.detach().to(torch.float64)
    if valid is not None:
        probabilities = probabilities[_valid_tokens(valid, scores.shape[0])]
    if not bool((torch.isfinite(probabilities) & (probabilities >= 0)).all()):
        raise InvalidInputError("scores holds a negative or non-finite value: pass probabilities")
    sums = probabilities.sum(-1, keepdim=True)
    if normalise:
        if not bool((sums > 0).all()):
            raise InvalidInputError("scores has a row that is all zero: it cannot be normalised")
        probabilities = probabilities / sums
    elif not bool(((sums - 1.0).abs() <= 1e-2).all()):
        raise InvalidInputError(
            "scores has a row that does not add up to 1: pass the softmax over all experts, "
            "or sigmoid scores with normalise=True"
        )
    if probabilities.numel() == 0:
        return 0.0
    return float(probabilities.topk(topk, dim=-1).values.sum(-1).mean())


def _flips(ids: Tensor, other: Tensor, valid: Tensor | None, *, ordered: bool) -> Tensor:
    """bool ``[counted tokens, layers]``: True where the two differ."""
    if ids.dim() != 3 or ids.shape != other.shape:
        raise InvalidInputError(
            f"ids is {list(ids.shape)} and other {list(other.shape)}: "
            "use equal shapes [tokens, layers, topk]"
        )
    require_integer("ids", ids)
    require_integer("other", other)
    left, right = ids, other
    if valid is not None:
        kept = _valid_tokens(valid, ids.shape[0])
        left, right = left[kept], right[kept]
    if left.dtype != right.dtype:
        left, right = left.to(torch.int32), right.to(torch.int32)
    if not ordered:
        left, right = sortable(left).sort(dim=-1).values, sortable(right).sort(dim=-1).values
    return (left != right).any(dim=-1)


def _valid_tokens(valid: Tensor, tokens: int) -> Tensor:
    if valid.dtype != torch.bool or valid.shape != (tokens,):
        raise InvalidInputError(
            f"valid is {valid.dtype} {list(valid.shape)}: use one bool per token, [{tokens}]"
        )
    return valid
