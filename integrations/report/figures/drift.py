"""Do rollout and learner compute the same number? Differences at the same weight version."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from integrations.report.figures.axes import line, say, version_axis
from integrations.report.record import RunRecord
from integrations.report.theme import LIGHT

__all__ = ["DRIFT_SERIES", "draw_drift", "draw_drift_series"]

# Column, title, label of the y axis.
DRIFT_SERIES = (
    ("k3_kl", "k3 KL divergence", "nats"),
    ("max_abs_diff", "largest |difference| of log-probabilities", "nats"),
    ("router_flip_rate", "router flips", "share of choices"),
)


def draw_drift(axes_list: list[Axes], run: RunRecord) -> None:
    """One small plot per measure."""
    for axes, (column, title, unit) in zip(axes_list, DRIFT_SERIES, strict=True):
        axes.set_title(title)
        draw_drift_series(axes, run, column, unit)
        version_axis(axes)


def draw_drift_series(axes: Axes, run: RunRecord, column: str, unit: str) -> None:
    """One measure of drift; a series of exact zeros is drawn as a line and said in words."""
    x, y = run.audited.column("version"), run.audited.column(column)
    known = np.isfinite(y)
    x, y = x[known], y[known]
    if y.size == 0:
        say(axes, "not measured")
        return
    zero = bool((y == 0).all())
    line(axes, x, y, LIGHT.held_out if zero else LIGHT.alert, linewidth=2.2)
    axes.set_ylabel(unit)
    if zero:
        axes.set_ylim(-1, 1)
        axes.set_yticks([0], ["0"])
        noun = "version" if y.size == 1 else "versions"
        axes.annotate(
            f"exactly 0 in {y.size:,} audited {noun}",
            (0.5, 0.5), xycoords="axes fraction", xytext=(0, 6), textcoords="offset points",
            ha="center", va="bottom", color=LIGHT.held_out, weight="bold",
        )  # fmt: skip
        return
    axes.set_ylim(bottom=min(0.0, float(y.min())))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=3))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2g}"))
    axes.set_title(f"up to {y.max():.2g}", loc="right", color=LIGHT.alert)
