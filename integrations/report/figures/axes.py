"""What all plots share: axes against weight version, sparse lines, words where there is no data."""

from __future__ import annotations

import itertools

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from integrations.report.table import Floats
from integrations.report.theme import LIGHT

__all__ = [
    "DISTINCT",
    "POINTS",
    "close_up_to_zero",
    "line",
    "say",
    "smooth",
    "thin",
    "trend",
    "version_axis",
]

# More points than this cannot be told apart at the width of a plot; they only make the page heavy.
POINTS = 800

# Up to this many points the eye follows a line from point to point.
DISTINCT = 100


def thin(x: Floats, y: Floats, limit: int = POINTS) -> tuple[Floats, Floats]:
    """About `limit` points that keep the shape: the lowest and the highest of each bucket."""
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    if x.size <= limit:
        return x, y
    edges = np.linspace(0, x.size, limit // 2 + 1).astype(np.int64)
    keep = {0, x.size - 1}
    for start, stop in itertools.pairwise(edges):
        keep.add(int(start + y[start:stop].argmin()))
        keep.add(int(start + y[start:stop].argmax()))
    chosen = np.array(sorted(keep))
    return x[chosen], y[chosen]


def smooth(y: Floats, window: int) -> Floats:
    """Centred mean over `window` neighbours, over fewer at the ends."""
    if y.size == 0 or window <= 1:
        return y
    kernel = np.ones(min(window, y.size))
    return np.convolve(y, kernel, "same") / np.convolve(np.ones_like(y), kernel, "same")


def line(axes: Axes, x: Floats, y: Floats, colour: str, **options: object) -> bool:
    """Draws the known points of a series; tells whether there were any."""
    x, y = thin(x, y)
    if x.size == 0:
        return False
    style: dict[str, object] = {"color": colour, **options}
    if x.size == 1:
        style["marker"] = "o"
    axes.plot(x, y, **style)  # pyright: ignore[reportArgumentType]
    return True


def trend(axes: Axes, x: Floats, y: Floats, colour: str, **options: object) -> bool:
    """A series as recorded; a long one faint, with a moving mean as the strong line."""
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    window = max(1, y.size // 20) if y.size > DISTINCT else 1
    if window > 1:
        line(axes, x, y, colour, linewidth=0.7, alpha=0.3)
    return line(axes, x, smooth(y, window), colour, **options)


def version_axis(axes: Axes, label: str = "weight version") -> None:
    """Whole numbers along x."""
    left, right = axes.get_xlim()
    if right - left < 1:
        axes.set_xlim((left + right) / 2 - 0.5, (left + right) / 2 + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.set_xlabel(label)


def close_up_to_zero(axes: Axes, top: float) -> None:
    """A y axis from zero to a little above `top`, so that heights compare."""
    axes.set_ylim(0, top * 1.15 if top > 0 and np.isfinite(top) else 1)


def say(axes: Axes, text: str) -> None:
    """Words in the middle of axes that have nothing to show."""
    axes.set_axis_off()
    axes.text(
        0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=LIGHT.muted
    )  # fmt: skip
