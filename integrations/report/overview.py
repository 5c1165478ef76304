"""One compact picture of a run, for a README or a chat."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from integrations.report.figures.axes import version_axis
from integrations.report.figures.drift import draw_drift_series
from integrations.report.figures.reward import draw_reward
from integrations.report.figures.staleness import draw_staleness
from integrations.report.figures.timeline import draw_lanes
from integrations.report.record import RunRecord, load_run
from integrations.report.table import is_number
from integrations.report.theme import LIGHT, figure, png_bytes

__all__ = ["render_overview_png", "save_overview_png"]


def render_overview_png(run_dir: Path | str, out: Path | str) -> Path:
    """Draws held-out reward, drift, staleness and the time line of a run into one PNG.

    Returns:
        the path of the picture.

    Raises:
        ReportError: `run_dir` does not exist or holds no event.
        OSError: the picture cannot be written.
    """
    return save_overview_png(load_run(run_dir), out)


def save_overview_png(run: RunRecord, out: Path | str) -> Path:
    """`render_overview_png` for a run that is read already."""
    target = Path(out)
    target.write_bytes(_draw(run))
    return target


def _draw(run: RunRecord) -> bytes:
    with figure(11, 6.2, padding=0.11) as drawing:
        panels = drawing.subplot_mosaic([["reward", "drift"], ["staleness", "time"]])
        panels["reward"].set_title("Reward", weight="bold")
        draw_reward(panels["reward"], run)
        panels["drift"].set_title(
            "Drift: k3 KL of rollout against learner, same version", weight="bold"
        )
        draw_drift_series(panels["drift"], run, "k3_kl", "nats")
        if run.drift_is_zero:
            _say_what_was_audited(panels["drift"], run)
        version_axis(panels["drift"])
        panels["staleness"].set_title("Staleness of the training data", weight="bold")
        draw_staleness(panels["staleness"], run)
        panels["time"].set_title(_swaps_in_words(run), weight="bold")
        draw_lanes(panels["time"], run, compact=True)
        drawing.set_facecolor("white")
        return png_bytes(drawing, dots_per_inch=160)


def _swaps_in_words(run: RunRecord) -> str:
    seconds = run.summary.get("swap_seconds_p50")
    if not is_number(seconds):
        return "Learner, rollout engine and weight swaps"
    return f"Learner, rollout and {len(run.swaps):,} weight swaps (median {seconds * 1e3:.3g} ms)"


def _say_what_was_audited(axes: Axes, run: RunRecord) -> None:
    tokens = int(np.nansum(run.audited.column("audited_tokens")))
    axes.annotate(
        f"{tokens:,} tokens re-scored; router flips: 0; largest difference: 0",
        (0.5, 0.5), xycoords="axes fraction", xytext=(0, -8), textcoords="offset points",
        ha="center", va="top", color=LIGHT.muted,
    )  # fmt: skip
