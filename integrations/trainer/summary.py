"""Figures of a whole run, in the keys that `lockstep train --json` prints."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from integrations.trainer.trajectory import Trajectory


@dataclass(slots=True)
class RunSummary:
    """Accumulates the events of a run; of a resumed run, the events since the resume.

    Drift is weighted by the number of audited tokens, flips by the (row, MoE layer) pairs.
    Throughput is tokens per second of the time in which the worker was busy, without waiting.
    """

    reward_start: float | None = None
    reward_end: float | None = None
    audited_tokens: int = 0
    unaudited_tokens: int = 0
    k3_sum: float = 0.0
    max_abs_diff: float = 0.0
    router_flips: float = 0.0
    router_pairs: int = 0
    max_staleness: int = 0
    swap_seconds: list[float] = field(default_factory=list)
    pause_seconds: list[float] = field(default_factory=list)
    rollout_tokens: int = 0
    rollout_busy: float = 0.0
    learner_tokens: int = 0
    learner_busy: float = 0.0
    trajectories: int = 0
    lost: int = 0

    def add_step(self, event: dict[str, Any]) -> None:
        audited = int(event["audited_tokens"])
        self.audited_tokens += audited
        self.unaudited_tokens += int(event["unaudited_tokens"])
        self.k3_sum += event["k3_kl"] * audited
        pairs = int(event["router_pairs"])
        self.router_flips += event["router_flip_rate"] * pairs
        self.router_pairs += pairs
        self.max_abs_diff = max(self.max_abs_diff, event["max_abs_diff"])
        self.max_staleness = max(self.max_staleness, int(event["staleness_max"]))
        self.learner_tokens += int(event["tokens"])
        self.learner_busy += event["ended"] - event["started"]
        self.trajectories += int(event["trajectories"])

    def add_evaluation(self, phase: str, reward: float) -> None:
        if phase == "start":
            self.reward_start = reward
        elif phase == "end":
            self.reward_end = reward

    def add_swap(self, event: dict[str, Any]) -> None:
        self.swap_seconds.append(event["swap_seconds"])
        self.pause_seconds.append(event["pause_seconds"])

    def add_rollout(self, event: dict[str, Any]) -> None:
        self.rollout_tokens += int(event["tokens"])
        self.rollout_busy += event["busy_seconds"]

    def as_dict(self) -> dict[str, Any]:
        """The keys of `train --json` (design, section 6) and the basis of the drift figures."""
        tokens = self.audited_tokens
        return {
            "reward_start": self.reward_start,
            "reward_end": self.reward_end,
            "k3_kl": self.k3_sum / tokens if tokens else None,
            "max_abs_diff": self.max_abs_diff if tokens else None,
            "router_flip_rate": self._flip_rate(),
            "audited_tokens": tokens,
            "unaudited_tokens": self.unaudited_tokens,
            "max_staleness": self.max_staleness,
            "swaps": len(self.swap_seconds),
            "swap_seconds_p50": statistics.median(self.swap_seconds) if self.swap_seconds else None,
            "pause_seconds_max": max(self.pause_seconds) if self.pause_seconds else None,
            "rollout_tokens_per_second": _rate(self.rollout_tokens, self.rollout_busy),
            "learner_tokens_per_second": _rate(self.learner_tokens, self.learner_busy),
            "trajectories": self.trajectories,
            "lost": self.lost,
        }

    def _flip_rate(self) -> float | None:
        """None when nothing was audited; 0 for a dense model, which has no router to disagree."""
        if not self.audited_tokens:
            return None
        return self.router_flips / self.router_pairs if self.router_pairs else 0.0


def _rate(count: float, per: float) -> float | None:
    return count / per if per > 0 else None


def batch_facts(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """What the `step` event says about a batch that is trained on after `version`.

    The staleness of a trajectory is that of its oldest token.
    """
    staleness = [version - min(sample.versions) for sample in trajectories]
    lengths = [len(sample.response_ids) for sample in trajectories]
    return {
        "staleness_mean": sum(staleness) / len(staleness),
        "staleness_max": float(max(staleness)),
        "response_length_mean": sum(lengths) / len(lengths),
    }
