"""What to do about the drift that remains: importance weights, masks, and the loss they enter.

Everything here takes log-probabilities of the *sampled* tokens, fp32, as ``[B, T]`` (one sequence
per row) or packed ``[T]`` (one sequence, unless ``cu_seqlens`` cuts it):

    lp       learner, current weights; carries the gradient
    lp_old   learner, weights at the start of the update
    lp_roll  rollout engine, when the token was sampled
"""

from __future__ import annotations

from consistency.correction.advantages import group_advantage, informative_groups
from consistency.correction.aggregation import LossCounts, aggregate
from consistency.correction.icepop import icepop
from consistency.correction.kl_penalty import kl_penalty
from consistency.correction.masked import divergence_mask, off_policy_sequence_mask, ratio_mask
from consistency.correction.policy import PolicyLoss, policy_loss
from consistency.correction.ratios import gspo_token_ratio, sequence_ratio, token_ratio
from consistency.correction.record import Correction
from consistency.correction.rewards import overlong_penalty
from consistency.correction.rules import (
    CORRECTIONS,
    CorrectionRule,
    make_correction,
    no_correction,
)
from consistency.correction.truncated import sequence_tis, token_tis

__all__ = [
    "CORRECTIONS",
    "Correction",
    "CorrectionRule",
    "LossCounts",
    "PolicyLoss",
    "aggregate",
    "divergence_mask",
    "group_advantage",
    "gspo_token_ratio",
    "icepop",
    "informative_groups",
    "kl_penalty",
    "make_correction",
    "no_correction",
    "off_policy_sequence_mask",
    "overlong_penalty",
    "policy_loss",
    "ratio_mask",
    "sequence_ratio",
    "sequence_tis",
    "token_ratio",
    "token_tis",
]
