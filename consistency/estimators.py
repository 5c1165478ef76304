"""Per-sample estimators of a KL divergence, one definition each.

With samples y ~ p and the log-ratio d = log q(y) - log p(y), each estimates KL(p || q):

    k1 = -d              unbiased, either sign
    k2 = d^2 / 2         biased, >= 0
    k3 = e^d - 1 - d     unbiased, >= 0

The direction is decided by the caller, who decides what p (the sampler) and q are: metrics between
rollout and learner take p = rollout; a penalty against a reference takes p = the policy. Swapping p
and q in k3, as some published code does, is ``k3(-d)`` and estimates another quantity.
"""

from __future__ import annotations

from torch import Tensor, expm1


def k1(log_ratio: Tensor) -> Tensor:
    """-d, elementwise."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """d^2 / 2, elementwise."""
    return log_ratio.square() / 2


def k3(log_ratio: Tensor) -> Tensor:
    """e^d - 1 - d, elementwise; through expm1, so that a small d does not cancel to nothing."""
    return expm1(log_ratio) - log_ratio
