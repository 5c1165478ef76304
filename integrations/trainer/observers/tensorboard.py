"""Events as TensorBoard scalars, in one group per question."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from integrations.trainer.observers.jsonl import plain
from integrations.trainer.observers.observer import Event

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

__all__ = ["TensorBoardObserver"]

# Key of a step event to the tag it is drawn under.
STEP_TAGS: Mapping[str, str] = {
    "reward_mean": "reward/training",
    "reward_std": "reward/training_standard_deviation",
    "staleness_mean": "staleness/mean",
    "staleness_max": "staleness/max",
    "off_policy_k3_kl": "staleness/off_policy_k3_kl",
    "ess": "staleness/effective_sample_size",
    "masked_fraction": "staleness/masked_fraction",
    "loss": "learner/loss",
    "entropy": "learner/entropy",
    "gradient_norm": "learner/gradient_norm",
    "clip_fraction": "learner/clip_fraction",
    "response_length_mean": "learner/response_length",
    "learner_tokens_per_second": "throughput/learner_tokens_per_second",
}
AUDIT_TAGS: Mapping[str, str] = {
    "k3_kl": "drift/k3_kl",
    "mean_abs_diff": "drift/mean_abs_diff",
    "max_abs_diff": "drift/max_abs_diff",
    "exact_fraction": "drift/exact_fraction",
    "router_flip_rate": "drift/router_flip_rate",
    "audited_tokens": "drift/audited_tokens",
}
SWAP_TAGS: Mapping[str, str] = {
    "swap_seconds": "swap/publish_to_committed_seconds",
    "stage_seconds": "swap/stage_seconds",
    "pause_seconds": "swap/pause_seconds",
}


class TensorBoardObserver:
    """Writes scalars over the weight version (over the warm-start step for the warm start).

    In a resumed run, what an earlier attempt wrote from the first version of this one on is
    dropped, so that TensorBoard draws one line and not two.
    """

    def __init__(self, folder: Path | str) -> None:
        self._folder = Path(folder)
        self._writer: SummaryWriter | None = None
        self._resumed = False
        self._recipe: str | None = None
        self._rollout_tokens = 0.0
        self._rollout_seconds = 0.0

    def __call__(self, event: Event) -> None:
        match event.get("event"):
            case "run_started":
                self._resumed = bool(event.get("resumed"))
                self._recipe = json.dumps(plain(event.get("recipe")), indent=2, ensure_ascii=False)
            case "warm_start":
                self._scalar("learner/warm_start_loss", event, "loss", step="step")
            case "evaluation":
                self._scalar("reward/held_out", event, "reward")
            case "step":
                self._step(event)
            case "swap":
                for key, tag in SWAP_TAGS.items():
                    replica = event.get("replica")
                    several = replica not in (0, None, "rollout-0")
                    self._scalar(f"{tag}/{replica}" if several else tag, event, key)
            case "checkpoint":
                self._scalar("learner/checkpoint_seconds", event, "seconds")
            case "rollout":
                self._rollout_tokens += _number(event.get("tokens")) or 0.0
                self._rollout_seconds += _number(event.get("busy_seconds")) or 0.0

    def close(self) -> None:
        """Flushes and closes the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _step(self, event: Event) -> None:
        for key, tag in STEP_TAGS.items():
            self._scalar(tag, event, key)
        # A step without an audit measured nothing, so it has no point in the drift plots.
        if event.get("audited_tokens"):
            for key, tag in AUDIT_TAGS.items():
                self._scalar(tag, event, key)
        if self._rollout_seconds > 0:
            rate = self._rollout_tokens / self._rollout_seconds
            rollout = {**event, "rate": rate}
            self._scalar("throughput/rollout_tokens_per_second", rollout, "rate")
            self._rollout_tokens = self._rollout_seconds = 0.0

    def _scalar(self, tag: str, event: Event, key: str, *, step: str = "version") -> None:
        value, at = _number(event.get(key)), _number(event.get(step))
        if value is None or at is None:
            return
        writer = self._open(int(at))
        writer.add_scalar(tag, value, global_step=int(at), walltime=_number(event.get("wall")))

    def _open(self, first_step: int) -> SummaryWriter:
        if self._writer is None:
            from torch.utils.tensorboard.writer import SummaryWriter  # slow to import

            purge = first_step if self._resumed else None
            self._writer = SummaryWriter(str(self._folder), purge_step=purge)
            if self._recipe is not None:
                self._writer.add_text("recipe", f"```\n{self._recipe}\n```", global_step=first_step)
        return self._writer


def _number(value: Any) -> float | None:
    """The value as a float; NaN and infinity stay, TensorBoard shows them as such."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if not math.isinf(number) else math.copysign(3.4e38, number)
