"""Is the optimisation healthy? Loss, entropy, gradient norm and response length."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from integrations.report.figures.axes import line, say, trend, version_axis
from integrations.report.record import RunRecord
from integrations.report.theme import LIGHT

__all__ = ["LEARNER_SERIES", "draw_learner", "draw_warm_start"]

# Column, title, unit, whether the axis begins at zero.
LEARNER_SERIES = (
    ("loss", "policy loss", "", False),
    ("entropy", "entropy of the policy", "nats per token", True),
    ("gradient_norm", "gradient norm before clipping", "", True),
    ("response_length_mean", "mean response length", "tokens", True),
)


def draw_learner(axes_list: list[Axes], run: RunRecord) -> None:
    """One small plot per series."""
    x = run.steps.column("version")
    for axes, (column, title, unit, from_zero) in zip(axes_list, LEARNER_SERIES, strict=True):
        axes.set_title(title + (f" ({unit})" if unit else ""))
        _draw_series(axes, x, run.steps.column(column), from_zero=from_zero)


def draw_warm_start(axes: Axes, run: RunRecord) -> None:
    """Loss of the supervised warm start."""
    if not line(axes, run.warm_start.column("step"), run.warm_start.column("loss"), LIGHT.learner):
        say(axes, "no warm start in this run")
        return
    axes.set_ylim(bottom=0)
    axes.set_ylabel("loss")
    version_axis(axes, "warm-start step")


def _draw_series(axes: Axes, x: np.ndarray, y: np.ndarray, *, from_zero: bool) -> None:
    known = np.isfinite(y)
    missing = int((~known).sum())
    x, y = x[known], y[known]
    if y.size == 0:
        say(axes, "not recorded" if missing == 0 else "not a number in every version")
        return
    trend(axes, x, y, LIGHT.learner)
    if from_zero:
        axes.set_ylim(bottom=min(0.0, float(y.min())))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
    if missing:
        axes.annotate(
            f"{missing} not a number", (1, 1), xycoords="axes fraction", ha="right", va="bottom",
            color=LIGHT.alert,
        )  # fmt: skip
    version_axis(axes)
