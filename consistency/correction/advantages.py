"""Group advantages: each response against the others that answer the same prompt."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from consistency.errors import InvalidInputError
from consistency.token_layout import maximum_by_length, sum_by_length

AdvantageKind = Literal["grpo", "dr_grpo", "rloo"]


def group_advantage(
    rewards: Tensor, groups: Tensor, kind: AdvantageKind = "grpo", *, epsilon: float = 1e-6
) -> Tensor:
    """Advantage of each response within its prompt group.

        grpo     (R - mean_g) / (std_g + epsilon), unbiased std (n - 1)
        dr_grpo  R - mean_g
        rloo     (R - mean_g) * n / (n - 1) = R - mean of the others

    A group whose rewards are all equal gives exactly 0. A group of one has no baseline: its mean is
    taken as 0 and its std as 1, in every kind.

    Args:
        rewards: floating ``[B]``, finite.
        groups: integer ``[B]``: prompt of each response; groups need not be adjacent or of equal
            size.
        kind: ``grpo``, ``dr_grpo`` or ``rloo``.
        epsilon: added to the std (grpo only).

    Returns:
        ``[B]`` in the dtype of ``rewards``, detached.

    Raises:
        InvalidInputError: bad shapes or dtypes, a reward that is not finite, an unknown kind.
    """
    if kind not in ("grpo", "dr_grpo", "rloo"):
        raise InvalidInputError(f"kind is {kind!r}: use 'grpo', 'dr_grpo' or 'rloo'")
    order, member, sizes = _grouping(rewards, groups, "rewards")
    values = rewards.detach().to(torch.float64)[order]
    mean = sum_by_length(values, sizes) / sizes
    mean = torch.where(sizes == 1, torch.zeros_like(mean), mean)
    centred = values - mean[member]
    if kind == "grpo":
        squares = sum_by_length(centred.square(), sizes)
        deviation = (squares / (sizes - 1).clamp(min=1)).sqrt()
        deviation = torch.where(sizes == 1, torch.ones_like(deviation), deviation)
        centred = centred / (deviation[member] + epsilon)
    elif kind == "rloo":
        factor = torch.where(sizes == 1, torch.ones_like(mean), sizes / (sizes - 1).clamp(min=1))
        centred = centred * factor[member]
    flat = _constant(values, sizes) & (sizes > 1)
    centred = torch.where(flat[member], torch.zeros_like(centred), centred)
    out = torch.empty_like(centred)
    out[order] = centred
    return out.to(rewards.dtype)


def informative_groups(metric: Tensor, groups: Tensor) -> Tensor:
    """DAPO's dynamic sampling: True for responses whose group's metric is not constant.

    Args:
        metric: floating ``[B]``, finite: accuracy or reward.
        groups: integer ``[B]``.

    Returns:
        bool ``[B]``.
    """
    order, member, sizes = _grouping(metric, groups, "metric")
    varied = ~_constant(metric.detach().to(torch.float64)[order], sizes)
    out = torch.empty(metric.shape, dtype=torch.bool, device=metric.device)
    out[order] = varied[member]
    return out


def _grouping(values: Tensor, groups: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """(order that sorts by group, group index of each sorted entry, size of each group)."""
    if values.dim() != 1 or not values.is_floating_point():
        raise InvalidInputError(
            f"{name} is {values.dtype} {list(values.shape)}: use a floating tensor [responses]"
        )
    if groups.shape != values.shape or groups.is_floating_point() or groups.dtype == torch.bool:
        raise InvalidInputError(
            f"groups is {groups.dtype} {list(groups.shape)}: use one integer per response, "
            f"{list(values.shape)}"
        )
    bad = ~torch.isfinite(values)
    if bool(bad.any()):
        index = int(bad.nonzero()[0])
        raise InvalidInputError(
            f"{name}[{index}] is {float(values[index])}: score the response or leave it out"
        )
    order = torch.argsort(groups, stable=True)
    _, member, sizes = torch.unique_consecutive(
        groups[order], return_inverse=True, return_counts=True
    )
    return order, member, sizes


def _constant(values: Tensor, sizes: Tensor) -> Tensor:
    """Groups whose values are all equal: exact, where a std would leave rounding noise."""
    high = maximum_by_length(values, sizes)
    low = -maximum_by_length(-values, sizes)
    return high == low
