"""The key figures of a run, from its events alone.

A finished run states its own summary. These definitions stand in for a run that failed, was killed
or is still going on.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from integrations.report.table import Floats, Table

__all__ = ["summarise"]


def summarise(*, steps: Table, evaluations: Table, swaps: Table, rollouts: Table) -> dict[str, Any]:
    """The keys of ``lockstep train --json``; what the events do not tell is None.

    `k3_kl` and `router_flip_rate` are means over the audited tokens; `max_abs_diff`,
    `max_staleness` and `pause_seconds_max` are maxima; throughput is tokens over the time between
    the first and the last instant of rollout, and over the busy time of the learner.
    `lost` needs the journal, so it is None here.
    """
    rewards = evaluations.column("reward")
    rewards = rewards[np.isfinite(rewards)]
    audited_tokens = steps.column("audited_tokens")
    learner_seconds = _total(steps.column("ended") - steps.column("started"))
    rollout_seconds = _span(rollouts.column("started"), rollouts.column("ended"))
    return {
        "reward_start": float(rewards[0]) if rewards.size else None,
        "reward_end": float(rewards[-1]) if rewards.size > 1 else None,
        "k3_kl": _mean(steps.column("k3_kl"), audited_tokens),
        "max_abs_diff": _maximum(steps.column("max_abs_diff")),
        "router_flip_rate": _mean(steps.column("router_flip_rate"), audited_tokens),
        "max_staleness": _whole(_maximum(steps.column("staleness_max"))),
        "swaps": len(swaps),
        "swap_seconds_p50": _median(swaps.column("swap_seconds")),
        "pause_seconds_max": _maximum(swaps.column("pause_seconds")),
        "rollout_tokens_per_second": _ratio(_total(rollouts.column("tokens")), rollout_seconds),
        "learner_tokens_per_second": _ratio(_total(steps.column("tokens")), learner_seconds),
        "trajectories": int(_total(steps.column("trajectories"))),
        "lost": None,
    }


def _mean(values: Floats, weights: Floats) -> float | None:
    weights = np.where(np.isfinite(weights), weights, 0.0)
    known = np.isfinite(values) & (weights > 0)
    if not known.any():
        return None
    return float(np.average(values[known], weights=weights[known]))


def _maximum(values: Floats) -> float | None:
    values = values[np.isfinite(values)]
    return float(values.max()) if values.size else None


def _median(values: Floats) -> float | None:
    values = values[np.isfinite(values)]
    return float(np.median(values)) if values.size else None


def _total(values: Floats) -> float:
    return float(np.nansum(values))


def _span(started: Floats, ended: Floats) -> float:
    if not (np.isfinite(started).any() and np.isfinite(ended).any()):
        return 0.0
    return float(np.nanmax(ended) - np.nanmin(started))


def _ratio(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
