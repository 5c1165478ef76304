"""Is it learning? Held-out and training reward against weight version."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from integrations.report.figures.axes import line, say, trend, version_axis
from integrations.report.record import RunRecord
from integrations.report.theme import LIGHT

__all__ = ["draw_reward"]


def draw_reward(axes: Axes, run: RunRecord) -> None:
    """Held-out reward as the strong line, the mean reward of every training batch behind it."""
    versions, rewards = run.steps.column("version"), run.steps.column("reward_mean")
    known = np.isfinite(rewards)
    versions, rewards = versions[known], rewards[known]
    held_out_x, held_out_y = run.evaluations.column("version"), run.evaluations.column("reward")
    if rewards.size == 0 and not np.isfinite(held_out_y).any():
        say(axes, "no reward recorded yet")
        return
    trend(axes, versions, rewards, LIGHT.rollout, label="training batches", linewidth=1.2)
    line(
        axes, held_out_x, held_out_y, LIGHT.held_out,
        linewidth=2.2, marker="o" if held_out_x.size <= 60 else None, markersize=4.5,
        label="held out", zorder=3,
    )  # fmt: skip
    _label_ends(axes, held_out_x, held_out_y)
    low, high = axes.get_ylim()
    if low >= -0.2 and high <= 1.2:
        axes.set_ylim(min(low, 0.0), max(high, 1.0) + 0.06)
    axes.set_ylabel("mean reward")
    axes.legend(loc="lower right")
    version_axis(axes)


def _label_ends(axes: Axes, x: np.ndarray, y: np.ndarray) -> None:
    """The first and the last held-out value in figures, beside their points."""
    known = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
    for index in {int(known[0]), int(known[-1])} if known.size else ():
        first = index == known[0]
        axes.annotate(
            f"{y[index]:.3g}",
            (float(x[index]), float(y[index])),
            xytext=(4, -13) if first else (0, 8),
            textcoords="offset points",
            ha="left" if first else "right",
            color=LIGHT.held_out,
            weight="bold",
        )
