"""Divergence between the rollout engine and the learner: one definition of each number.

D_t = lp_train_t - lp_roll_t on the tokens that count, r_t = e^D_t; the samples come from the
rollout policy. Everything is computed in fp64 from the values as given, without gradient. Names
say what a mean is taken over, so that a token mean is never compared with a sequence mean.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from consistency.drift_bound import DriftBound
from consistency.errors import InvalidInputError
from consistency.estimators import k1, k2, k3
from consistency.routing_replay.agreement import (
    router_flip_rate,
    routing_confidence,
    token_flip_rate,
)
from consistency.token_layout import LOG_RATIO_LIMIT, TokenLayout

__all__ = [
    "CategoricalDivergence",
    "DriftBound",
    "MismatchMetrics",
    "ReferenceDivergence",
    "categorical_divergence",
    "categorical_kl",
    "mismatch_metrics",
    "reference_divergence",
    "router_flip_rate",
    "routing_confidence",
    "token_flip_rate",
]


@dataclass(frozen=True, slots=True)
class MismatchMetrics:
    """How far the learner's log-probabilities are from the rollout engine's.

    Over tokens:
        k1_kl, k2_kl, k3_kl: estimates of KL(rollout || learner): mean of -D, D^2 / 2, r - 1 - D.
            k1 may be negative on a finite sample; k3 never is.
        chi2_token: mean(r^2) - 1.
        ess: effective sample size divided by the number of tokens, mean(r)^2 / mean(r^2).
        mean_abs_diff, max_abs_diff: of D.
        exact_fraction: share of tokens whose two log-probabilities are equal, bit for bit.
        probs_diff_mean, probs_diff_max, probs_diff_std: of |e^lp_train - e^lp_roll|; unbiased std,
            0 for one token. Rule of thumb: a mean below .005 is fine, above .01 is trouble.
        probs_pearson: correlation of the two probabilities. Where a side does not vary it is not
            defined: 1 if the two are equal, else 0.
    Over sequences with at least one token that counts:
        chi2_sequence: mean of exp(2 sum D) - 1.
        train_ppl, rollout_ppl: mean of exp(-mean_t lp).
        log_ppl_diff: mean over sequences of (mean_t lp_roll - mean_t lp_train), and of its absolute
            value, its maximum and its minimum.
        ppl_ratio: mean of exp(log_ppl_diff).
    And:
        tokens, sequences: how many counted.
        valid: False when nothing counted; every number is then 0, never NaN.
    """

    k1_kl: float
    k2_kl: float
    k3_kl: float
    chi2_token: float
    chi2_sequence: float
    ess: float
    mean_abs_diff: float
    max_abs_diff: float
    exact_fraction: float
    train_ppl: float
    rollout_ppl: float
    log_ppl_diff: float
    log_ppl_diff_abs: float
    log_ppl_diff_max: float
    log_ppl_diff_min: float
    ppl_ratio: float
    probs_diff_mean: float
    probs_diff_max: float
    probs_diff_std: float
    probs_pearson: float
    tokens: int
    sequences: int
    valid: bool

    def as_dict(self) -> dict[str, float]:
        """Every field as a float under its own name, for a log; ``valid`` as 1.0 or 0.0."""
        return {name: float(value) for name, value in asdict(self).items()}


def mismatch_metrics(
    lp_train: Tensor,
    lp_roll: Tensor,
    mask: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    ess_limit: float | None = None,
) -> MismatchMetrics:
    """Compares the log-probabilities of the same tokens under the learner and the rollout engine.

    Args:
        lp_train: learner, any floating dtype, ``[B, T]`` or packed ``[T]``.
        lp_roll: rollout engine, same shape.
        mask: tokens that count, same shape, bool or 0/1; None = all.
        cu_seqlens: int ``[S + 1]``, cuts a packed batch; without it ``[T]`` is one sequence.
        ess_limit: clamps the weights of ``ess`` to [1 / limit, limit], as verl does. None = as they
            are: a clamp hides the very tail that the number should show.

    Returns:
        MismatchMetrics. D and its sum per sequence are clamped to +-20 before exp, nowhere else.

    Raises:
        InvalidInputError: shapes that do not fit, or a log-probability that is missing (NaN or
            infinite) under the mask; nothing is filled in for it.
    """
    if ess_limit is not None and not ess_limit > 1:
        raise InvalidInputError(f"ess_limit is {ess_limit!r}: use a number above 1, or None")
    layout = TokenLayout.of(lp_train, mask, cu_seqlens)
    train = layout.logprobs("lp_train", lp_train.detach()).to(torch.float64)
    roll = layout.logprobs("lp_roll", lp_roll.detach()).to(torch.float64)
    counts = layout.counts()
    tokens = int(counts.sum())
    if tokens == 0:
        return MismatchMetrics(*([0.0] * 20), tokens=0, sequences=0, valid=False)

    difference = (train - roll)[layout.mask]
    clamped = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = clamped.exp()
    weight = ratio if ess_limit is None else ratio.clamp(1.0 / ess_limit, ess_limit)

    filled = counts > 0
    total = layout.sum(train - roll)[filled].clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    train_mean, roll_mean = layout.mean(train)[filled], layout.mean(roll)[filled]
    log_ppl_diff = roll_mean - train_mean

    train_prob, roll_prob = train[layout.mask].exp(), roll[layout.mask].exp()
    probs_diff = (train_prob - roll_prob).abs()
    return MismatchMetrics(
        k1_kl=float(k1(clamped).mean()),
        k2_kl=float(k2(clamped).mean()),
        k3_kl=float(k3(clamped).mean()),
        # expm1 keeps the digits of a chi2 that is tiny because the engines agree.
        chi2_token=float(torch.expm1(2 * clamped).mean()),
        chi2_sequence=float(torch.expm1(2 * total).mean()),
        ess=float(weight.mean().square() / weight.square().mean()),
        mean_abs_diff=float(difference.abs().mean()),
        max_abs_diff=float(difference.abs().max()),
        exact_fraction=int((difference == 0).sum()) / tokens,
        train_ppl=float((-train_mean).exp().mean()),
        rollout_ppl=float((-roll_mean).exp().mean()),
        log_ppl_diff=float(log_ppl_diff.mean()),
        log_ppl_diff_abs=float(log_ppl_diff.abs().mean()),
        log_ppl_diff_max=float(log_ppl_diff.max()),
        log_ppl_diff_min=float(log_ppl_diff.min()),
        ppl_ratio=float(log_ppl_diff.exp().mean()),
        probs_diff_mean=float(probs_diff.mean()),
        probs_diff_max=float(probs_diff.max()),
        probs_diff_std=float(probs_diff.std()) if tokens > 1 else 0.0,
        probs_pearson=_pearson(train_prob, roll_prob),
        tokens=tokens,
        sequences=int(filled.sum()),
        valid=True,
    )


@dataclass(frozen=True, slots=True)
class ReferenceDivergence:
    """Estimates of KL(policy || reference) over the tokens that count.

    ``valid`` is False, and every number 0, when none counted.
    """

    k1_kl: float
    k2_kl: float
    k3_kl: float
    tokens: int
    valid: bool


def reference_divergence(
    lp: Tensor, lp_ref: Tensor, mask: Tensor | None = None, *, cu_seqlens: Tensor | None = None
) -> ReferenceDivergence:
    """Token means of d, d^2 / 2 and e^-d + d - 1 with d = lp - lp_ref; samples from the policy.

    Args:
        lp: the policy that sampled, ``[B, T]`` or packed ``[T]``.
        lp_ref: the reference, same shape.
        mask, cu_seqlens: as in `mismatch_metrics`.

    Raises:
        InvalidInputError: as in `mismatch_metrics`.
    """
    layout = TokenLayout.of(lp, mask, cu_seqlens)
    log_ratio = layout.log_ratio(
        ("lp_ref", lp_ref.detach().to(torch.float64)), ("lp", lp.detach().to(torch.float64))
    )[layout.mask]
    tokens = log_ratio.numel()
    if tokens == 0:
        return ReferenceDivergence(0.0, 0.0, 0.0, tokens=0, valid=False)
    k1_kl, k2_kl, k3_kl = (float(estimate(log_ratio).mean()) for estimate in (k1, k2, k3))
    return ReferenceDivergence(k1_kl, k2_kl, k3_kl, tokens=tokens, valid=True)


@dataclass(frozen=True, slots=True, eq=False)
class CategoricalDivergence:
    """Exact expectations under p, one per row, fp64 ``[...]``.

    Args:
        kl: KL(p || q) = E_p[k1] = E_p[k3].
        k2: E_p[(log q/p)^2 / 2], which is not the KL: k2 is biased.
        chi2: E_p[(q/p)^2] - 1.
    """

    kl: Tensor
    k2: Tensor
    chi2: Tensor


def categorical_divergence(log_p: Tensor, log_q: Tensor) -> CategoricalDivergence:
    """Divergence of two whole distributions, without sampling.

    Args:
        log_p: log-probabilities ``[..., V]``; -inf is a probability of 0.
        log_q: same shape. Where q is 0 and p is not, ``kl`` and ``k2`` are inf.

    Raises:
        InvalidInputError: shapes differ, or a row does not add up to 1.
    """
    if log_p.shape != log_q.shape or log_p.dim() == 0:
        raise InvalidInputError(
            f"log_p is {list(log_p.shape)} and log_q {list(log_q.shape)}: use equal shapes [..., V]"
        )
    p = _distribution("log_p", log_p)
    q = _distribution("log_q", log_q)
    present = p > 0
    log_ratio = torch.where(present, log_q.detach().to(torch.float64) - p.log(), 0.0)
    ratio = torch.where(present, q / p, 0.0)
    return CategoricalDivergence(
        kl=torch.where(present, p * k1(log_ratio), 0.0).sum(-1),
        k2=torch.where(present, p * k2(log_ratio), 0.0).sum(-1),
        chi2=torch.where(present, p * ratio.square(), 0.0).sum(-1) - 1.0,
    )


def categorical_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) = sum_v p_v (log p_v - log q_v), fp64 ``[...]``; see `categorical_divergence`."""
    return categorical_divergence(log_p, log_q).kl


def _distribution(name: str, log_values: Tensor) -> Tensor:
    values = log_values.detach().to(torch.float64).exp()
    error = (values.sum(-1) - 1.0).abs()
    # fp32 log-probabilities of a vocabulary of 2^18 add up to 1 within a few 1e-6; bf16 ones do
    # not.
    if not bool((error <= 1e-3).all()):
        raise InvalidInputError(
            f"{name} has a row that adds up to 1 only within {float(error.max()):.3g}: "
            "use the log-softmax over the whole vocabulary, in fp32"
        )
    return values


def _pearson(left: Tensor, right: Tensor) -> float:
    centred_left, centred_right = left - left.mean(), right - right.mean()
    scale = float(centred_left.square().sum().sqrt() * centred_right.square().sum().sqrt())
    if scale == 0.0:
        return 1.0 if torch.equal(left, right) else 0.0
    return min(1.0, max(-1.0, float((centred_left * centred_right).sum()) / scale))
