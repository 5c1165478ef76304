"""How fast do new weights arrive, and how long does generation wait for them?"""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from integrations.report.figures.axes import close_up_to_zero, say, version_axis
from integrations.report.record import RunRecord
from integrations.report.table import Floats
from integrations.report.theme import LIGHT

__all__ = ["draw_swap_latency", "draw_swap_pause"]

MILLISECONDS = 1e3
DOTS = 300


def draw_swap_latency(axes: Axes, run: RunRecord) -> None:
    """Publish to committed per swap, with the part that was staging beneath."""
    x = run.swaps.column("version")
    whole = run.swaps.column("swap_seconds") * MILLISECONDS
    stage = run.swaps.column("stage_seconds") * MILLISECONDS
    if not _dots(axes, x, whole, LIGHT.swap, "publish to committed"):
        say(axes, "no swap yet")
        return
    stage_x, stage_y = _sampled(x, stage)
    axes.plot(
        stage_x, stage_y, linestyle="none", marker="_", markersize=6, color=LIGHT.muted,
        label="of which staging",
    )  # fmt: skip
    _finish(axes, whole)
    axes.legend(loc="upper left", ncols=2, borderaxespad=0.1, handletextpad=0.2)


def draw_swap_pause(axes: Axes, run: RunRecord) -> None:
    """How long generation stood still for each swap."""
    pause = run.swaps.column("pause_seconds") * MILLISECONDS
    if not _dots(axes, run.swaps.column("version"), pause, LIGHT.rollout, "generation paused"):
        say(axes, "no swap yet")
        return
    _finish(axes, pause)


def _dots(axes: Axes, x: Floats, y: Floats, colour: str, label: str) -> bool:
    x, y = _sampled(x, y)
    if x.size == 0:
        return False
    axes.vlines(x, 0, y, color=colour, linewidth=0.9, alpha=0.35)
    axes.plot(x, y, linestyle="none", marker="o", markersize=3.4, color=colour, label=label)
    return True


def _sampled(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """At most `DOTS` swaps, evenly spread, and the slowest one: the others keep their density."""
    known = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
    if known.size > DOTS:
        spread = known[np.linspace(0, known.size - 1, DOTS).astype(np.int64)]
        known = np.union1d(spread, known[np.argmax(y[known])])
    return x[known], y[known]


def _finish(axes: Axes, values: Floats) -> None:
    values = values[np.isfinite(values)]
    close_up_to_zero(axes, float(values.max()) * 1.2)
    axes.annotate(
        f"median {np.median(values):.3g} ms, largest {values.max():.3g} ms",
        (1, 1), xycoords="axes fraction", ha="right", va="bottom", color=LIGHT.ink,
    )  # fmt: skip
    axes.set_ylabel("ms")
    version_axis(axes)
