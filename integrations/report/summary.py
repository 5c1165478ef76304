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

    `k3_kl` is a mean over the audited tokens, `router_flip_rate` over the audited (row, MoE layer)
    pairs; `max_abs_diff`, `max_staleness` and `pause_seconds_max` are maxima; throughput is tokens
    over the busy time. `lost` needs the journal, so it is None here.
    """
    rewards = evaluations.column("reward")
    rewards = rewards[np.isfinite(rewards)]
    audited_tokens = steps.column("audited_tokens")
    pairs = np.where(audited_tokens > 0, np.maximum(steps.column("router_pairs"), 1), 0)
    largest = np.where(audited_tokens > 0, steps.column("max_abs_diff"), np.nan)
    learner_seconds = _total(steps.column("ended") - steps.column("started"))
    rollout_seconds = _total(rollouts.column("busy_seconds"))
    return {
        "reward_start": float(rewards[0]) if rewards.size else None,
        "reward_end": float(rewards[-1]) if rewards.size > 1 else None,
        "k3_kl": _mean(steps.column("k3_kl"), audited_tokens),
        "max_abs_diff": _maximum(largest),
        "router_flip_rate": _mean(steps.column("router_flip_rate"), pairs),
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


def _ratio(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
