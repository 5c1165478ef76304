"""What a person wants to know about a run right now, kept up to date from its events."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from integrations.trainer.observers.observer import Event

__all__ = ["RunProgress"]

RECENT = 20


@dataclass
class RunProgress:
    """The state of a run after the events so far; the fields are None until an event tells."""

    name: str = ""
    phase: str = "starting"
    warm_step: int = 0
    warm_steps: int = 0
    warm_loss: float | None = None
    version: int = 0
    versions: int = 0
    held_out_first: float | None = None
    held_out_last: float | None = None
    reward: float | None = None
    drift: float | None = None
    drift_worst: float | None = None
    staleness_max: int | None = None
    swaps: int = 0
    swap_seconds: float | None = None
    pause_worst: float | None = None
    learner_rate: float | None = None
    _rollouts: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=RECENT))

    def update(self, event: Event) -> None:
        """Takes one event in; kinds that it does not know change nothing."""
        match event.get("event"):
            case "run_started":
                self._start(event)
            case "warm_start":
                self.phase = "warm start"
                self.warm_step, self.warm_steps = _int(event, "step"), _int(event, "steps")
                self.warm_loss = _float(event, "loss")
            case "evaluation":
                self.held_out_last = _float(event, "reward")
                if self.held_out_first is None:
                    self.held_out_first = self.held_out_last
            case "step":
                self._step(event)
            case "swap" if _int(event, "version") > 0:
                self.swaps += 1
                self.swap_seconds = _float(event, "swap_seconds")
                self.pause_worst = _largest(self.pause_worst, _float(event, "pause_seconds"))
            case "rollout":
                tokens, busy = _float(event, "tokens"), _float(event, "busy_seconds")
                if tokens is not None and busy is not None:
                    self._rollouts.append((tokens, busy))
            case "run_finished":
                self.phase = "finished"
            case "run_failed":
                self.phase = "failed"

    @property
    def rollout_rate(self) -> float | None:
        """Sampled tokens per busy second of the engines, over their last reports."""
        busy = sum(seconds for _, seconds in self._rollouts)
        return sum(tokens for tokens, _ in self._rollouts) / busy if busy > 0 else None

    def facts(self) -> str:
        """One line: reward, drift, staleness, swap time and throughput, as far as known."""
        parts = []
        if self.held_out_last is not None:
            parts.append(f"held-out {self.held_out_last:.3f}")
        if self.reward is not None:
            parts.append(f"reward {self.reward:.3f}")
        if self.drift_worst is not None:
            parts.append(f"drift {_exact(self.drift_worst)}")
        if self.staleness_max is not None:
            parts.append(f"staleness {self.staleness_max}")
        if self.swap_seconds is not None:
            parts.append(f"swap {self.swap_seconds * 1e3:.0f} ms")
        if self.rollout_rate is not None:
            parts.append(f"rollout {self.rollout_rate:,.0f} tok/s")
        if self.learner_rate is not None:
            parts.append(f"learner {self.learner_rate:,.0f} tok/s")
        return " · ".join(parts)

    def _start(self, event: Event) -> None:
        recipe = event.get("recipe")
        recipe = recipe if isinstance(recipe, dict) else {}
        self.name = str(recipe.get("name") or "")
        learner = recipe.get("learner")
        if isinstance(learner, dict):
            self.versions = _int(learner, "steps")

    def _step(self, event: Event) -> None:
        self.phase = "training"
        self.version = _int(event, "version")
        self.reward = _float(event, "reward_mean")
        if _float(event, "audited_tokens"):
            self.drift = _float(event, "max_abs_diff")
            self.drift_worst = _largest(self.drift_worst, self.drift)
        stale = _float(event, "staleness_max")
        self.staleness_max = None if stale is None else int(stale)
        self.learner_rate = _float(event, "learner_tokens_per_second")


def _int(event: Event, key: str) -> int:
    value = event.get(key)
    return int(value) if isinstance(value, int | float) and value == value else 0


def _float(event: Event, key: str) -> float | None:
    value: Any = event.get(key)
    return float(value) if isinstance(value, int | float) and value == value else None


def _largest(first: float | None, second: float | None) -> float | None:
    known = [value for value in (first, second) if value is not None]
    return max(known) if known else None


def _exact(value: float) -> str:
    return "exactly 0" if value == 0 else f"{value:.2g}"
