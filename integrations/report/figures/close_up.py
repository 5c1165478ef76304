"""Who worked when, in detail? A few versions from the middle of a run."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from integrations.report.figures.axes import say
from integrations.report.figures.timeline import LANE, replicas
from integrations.report.record import RunRecord
from integrations.report.table import is_number
from integrations.report.theme import LIGHT

__all__ = ["draw_close_up"]

VERSIONS = 5


def draw_close_up(axes: Axes, run: RunRecord) -> None:
    """A few versions from the middle: what the learner trains while the engines serve what."""
    window = _window(run)
    if window is None:
        say(axes, "a close-up needs at least two trained versions and their swaps")
        return
    begin, end = window
    engines = replicas(run)
    names = ["learner trains", "weights travel", *(f"{name} serves" for name in engines)]
    rows = {name: len(names) - 1 - index for index, name in enumerate(names)}
    for row in run.attempts_of_steps.rows:
        _labelled(axes, row.get("started"), row.get("ended"), rows["learner trains"],
                  row.get("version"), LIGHT.learner, window)  # fmt: skip
    for index, replica in enumerate(engines.values()):
        own = run.commits.matching("replica", replica).sorted_by("committed").rows
        lane = rows[names[2 + index]]
        for row, following in zip(own, [*own[1:], {"committed": run.duration}], strict=True):
            _labelled(axes, row.get("committed"), following.get("committed"), lane,
                      row.get("version"), LIGHT.rollout, window)  # fmt: skip
    for row in run.commits.rows:
        announced, committed = row.get("announced"), row.get("committed")
        if (
            not (is_number(announced) and is_number(committed))
            or committed < begin
            or announced > end
        ):
            continue
        crowded = end - committed < (end - begin) * 0.06
        thinnest = (end - begin) / 300
        axes.barh(
            rows["weights travel"], max(committed - announced, thinnest), left=announced,
            height=LANE, color=LIGHT.swap,
        )  # fmt: skip
        axes.annotate(
            "" if crowded else f"v{row.get('version')}  {(committed - announced) * 1e3:.0f} ms",
            (max(committed, announced + thinnest), rows["weights travel"]), xytext=(4, 0),
            textcoords="offset points", va="center", color=LIGHT.swap,
        )  # fmt: skip
        axes.axvline(committed, color=LIGHT.swap, linewidth=0.7, alpha=0.45, zorder=0)
    axes.set_yticks(list(rows.values()), list(rows))
    axes.tick_params(axis="y", labelcolor=LIGHT.ink)
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.set_xlim(begin, end)
    axes.grid(visible=False)
    axes.set_xlabel("seconds since the run began")


def _window(run: RunRecord) -> tuple[float, float] | None:
    """From the beginning to the end of a few consecutive versions in the middle of the run."""
    spans = run.steps.where(
        np.isfinite(run.steps.column("started")) & np.isfinite(run.steps.column("ended"))
    )
    committed = run.swaps.column("committed")
    if len(spans) < 2 or not np.isfinite(committed).any():
        return None
    # From the middle outwards: a window with a resume in it would show a gap that is not typical.
    middle = max(0, (len(spans) - VERSIONS) // 2)
    for first in sorted(range(max(1, len(spans) - VERSIONS + 1)), key=lambda at: abs(at - middle)):
        chosen = spans.rows[first : first + VERSIONS]
        begin, end = float(chosen[0]["started"]), float(chosen[-1]["ended"])
        if begin < end and not any(begin < resumed < end for resumed in run.resumed_at):
            margin = (end - begin) * 0.02
            return begin - margin, end + margin
    return None


def _labelled(
    axes: Axes,
    begin: object,
    end: object,
    row: int,
    version: object,
    colour: str,
    window: tuple[float, float],
) -> None:
    """A bar clipped to the window, with its version inside where there is room."""
    if not (is_number(begin) and is_number(end)):
        return
    left, right = max(float(begin), window[0]), min(float(end), window[1])
    if right <= left:
        return
    odd = isinstance(version, int) and version % 2 == 1
    axes.barh(
        row, right - left, left=left, height=LANE, color=colour, alpha=0.34 if odd else 0.2,
        linewidth=0,
    )  # fmt: skip
    axes.vlines([left], row - LANE / 2, row + LANE / 2, color=colour, linewidth=2)
    if right - left > (window[1] - window[0]) * 0.035:
        axes.text(
            (left + right) / 2, row, f"v{version}", ha="center", va="center", color=LIGHT.ink
        )  # fmt: skip
