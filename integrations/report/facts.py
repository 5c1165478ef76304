"""The figures of a run in words: key figures, the headline sentence, and what needs attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from integrations.report.markup import MISSING
from integrations.report.record import RunRecord
from integrations.report.table import is_number

__all__ = ["Tile", "attention", "duration_text", "headline", "tiles"]


@dataclass(frozen=True)
class Tile:
    """One key figure: what it is, its value and unit, and what it was measured over."""

    label: str
    value: str
    unit: str = ""
    detail: str = ""
    tone: Literal["plain", "good", "bad"] = "plain"


def tiles(run: RunRecord) -> list[Tile]:
    """The key figures, in the order in which people ask for them."""
    summary = run.summary
    lost = summary.get("lost")
    busiest = _audited_tokens(run)
    audited = f"{busiest:,} tokens audited" if busiest else "not audited"
    limit = run.staleness_limit
    return [
        Tile("Held-out reward", _reward(summary), detail=_reward_detail(summary)),
        Tile(
            "k3 KL, rollout to learner",
            _exact(summary.get("k3_kl")),
            detail=f"same version; {audited}",
            tone=_tone(summary.get("k3_kl")),
        ),
        Tile(
            "Largest difference",
            _exact(summary.get("max_abs_diff")),
            detail="of two log-probabilities, nats",
            tone=_tone(summary.get("max_abs_diff")),
        ),
        Tile(
            "Router flips",
            _exact(summary.get("router_flip_rate")),
            detail="share of expert choices that differ",
            tone=_tone(summary.get("router_flip_rate")),
        ),
        Tile(
            "Largest staleness",
            _plain(summary.get("max_staleness")),
            "versions",
            detail=f"limit {limit}" if limit is not None else "",
        ),
        Tile("Weight swaps", _plain(summary.get("swaps")), detail=_model_size(run)),
        Tile(
            "Publish to committed",
            _milliseconds(summary.get("swap_seconds_p50")),
            "ms",
            detail="median over all swaps",
        ),
        Tile(
            "Longest pause",
            _milliseconds(summary.get("pause_seconds_max")),
            "ms",
            detail="generation stopped for a swap",
        ),
        Tile(
            "Throughput",
            _plain(summary.get("rollout_tokens_per_second")),
            "tokens/s",
            detail=f"rollout; learner {_plain(summary.get('learner_tokens_per_second'))} tokens/s",
        ),
        Tile(
            "Trajectories",
            _plain(summary.get("trajectories")),
            detail="trained on" if lost is None else f"trained on; {lost:,} lost",
            tone="bad" if lost else "plain",
        ),
    ]


def headline(run: RunRecord) -> str:
    """What a reader who stops after one paragraph should know."""
    count = len(run.steps)
    if count == 0:
        return "No weight version has been trained yet."
    noun = "weight version" if count == 1 else "weight versions"
    parts = [f"{count:,} {noun} trained in {duration_text(run.duration)}."]
    start, end = run.summary.get("reward_start"), run.summary.get("reward_end")
    if is_number(start) and is_number(end):
        verb = "rose" if end > start else "fell" if end < start else "stayed"
        change = f"from {start:.3g} to {end:.3g}" if end != start else f"at {end:.3g}"
        parts.append(f"Held-out reward {verb} {change}.")
    audited = _audited_tokens(run)
    if run.drift_is_zero:
        parts.append(
            "Rollout and learner agreed exactly: every audited log-probability"
            f" ({audited:,} tokens) is the same number on both sides, bit for bit."
        )
    elif len(run.audited):
        parts.append(
            "Rollout and learner did not agree: the largest difference of a log-probability at the"
            f" same weight version is {_exact(run.summary.get('max_abs_diff'))}."
        )
    return " ".join(parts)


def attention(run: RunRecord) -> list[str]:
    """What an operator should look at, one sentence each; empty when all is well."""
    found = []
    if run.status == "failed":
        found.append(f"The run failed: {run.reason}")
    if len(run.audited) and not run.drift_is_zero:
        found.append(
            "Drift is not zero. Rollout and learner compute different numbers at the same weight"
            " version; compare their contract digests, kernels and weights."
        )
    largest = run.steps.column("staleness_max")
    limit = run.staleness_limit
    if limit is not None and largest.size and bool((largest > limit).any()):
        found.append(f"Staleness went above its limit of {limit} versions.")
    for name in ("loss", "gradient_norm"):
        broken = [row for row in run.steps.rows if name in row and not is_number(row[name])]
        if broken:
            noun = "version" if len(broken) == 1 else "versions"
            found.append(
                f"{name.replace('_', ' ')} is not a number in {len(broken):,} {noun}, the first"
                f" being version {broken[0].get('version')}."
            )
    if run.replay_diverged:
        steps = ", ".join(str(step) for step in run.replay_diverged[:5])
        found.append(
            f"Training a step again after a resume gave other weights than before (step {steps}):"
            " the learner is not deterministic."
        )
    if run.summary.get("lost"):
        found.append(f"{run.summary['lost']:,} trajectories were lost.")
    return found


def duration_text(seconds: float) -> str:
    """``47 s``, ``3 min 20 s``, ``5 h 12 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"


def _audited_tokens(run: RunRecord) -> int:
    return int(np.nansum(run.audited.column("audited_tokens")))


def _exact(value: Any) -> str:
    if not is_number(value):
        return "not measured"
    return "exactly 0" if value == 0 else f"{value:.3g}"


def _tone(value: Any) -> Literal["plain", "good", "bad"]:
    if not is_number(value):
        return "plain"
    return "good" if value == 0 else "bad"


def _plain(value: Any) -> str:
    return f"{value:,.0f}" if is_number(value) else MISSING


def _milliseconds(value: Any) -> str:
    if not is_number(value):
        return MISSING
    return f"{value * 1e3:.3g}" if value < 1 else f"{value * 1e3:,.0f}"


def _reward(summary: Any) -> str:
    start, end = summary.get("reward_start"), summary.get("reward_end")
    if is_number(start) and is_number(end):
        return f"{start:.2f} → {end:.2f}"
    return f"{start:.2f}" if is_number(start) else MISSING


def _reward_detail(summary: Any) -> str:
    return "first → last evaluation" if is_number(summary.get("reward_end")) else "first evaluation"


def _model_size(run: RunRecord) -> str:
    if run.model_bytes is None:
        return ""
    if run.model_bytes >= 1e9:
        return f"{run.model_bytes / 1e9:.2f} GB each"
    return f"{run.model_bytes / 1e6:.1f} MB each"
