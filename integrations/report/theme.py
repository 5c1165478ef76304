"""Colours of the report, and drawings that follow the reader's light or dark setting.

A figure is always drawn in the light colours. In the SVG that goes into the page each of them is
then replaced by the CSS variable of its role, so one drawing serves both settings.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

__all__ = ["DARK", "LIGHT", "Colours", "figure", "png_bytes", "svg_text"]


@dataclass(frozen=True)
class Colours:
    """One colour per role. Series colours have at least 3:1 contrast with `surface`.

    Learner and rollout, the two that always meet, are blue and orange: the pair that the common
    forms of colour blindness keep apart.
    """

    surface: str
    ink: str
    muted: str
    grid: str
    learner: str
    rollout: str
    swap: str
    held_out: str
    alert: str


LIGHT = Colours(
    surface="#ffffff",
    ink="#1c2330",
    muted="#667084",
    grid="#e3e7ee",
    learner="#2767b5",
    rollout="#cc6a0e",
    swap="#8145b8",
    held_out="#0b7f73",
    alert="#c42f2a",
)
DARK = Colours(
    surface="#171c25",
    ink="#e7ebf2",
    muted="#98a3b5",
    grid="#2c3442",
    learner="#6fabf2",
    rollout="#f0a04e",
    swap="#c49af0",
    held_out="#4fcdb9",
    alert="#f58a80",
)

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.edgecolor": LIGHT.grid,
    "axes.labelcolor": LIGHT.muted,
    "axes.labelsize": 9.5,
    "axes.titlecolor": LIGHT.ink,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titlepad": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.xmargin": 0.02,
    "figure.facecolor": "none",
    "grid.color": LIGHT.grid,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "legend.labelcolor": LIGHT.ink,
    "legend.handlelength": 1.6,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "text.color": LIGHT.ink,
    "xtick.color": LIGHT.grid,
    "xtick.labelcolor": LIGHT.muted,
    "ytick.color": LIGHT.grid,
    "ytick.labelcolor": LIGHT.muted,
    "ytick.major.size": 0,
}


@contextmanager
def figure(width: float, height: float, *, padding: float = 0.045) -> Iterator[Figure]:
    """A figure in the report's style, in inches, without the global state of pyplot.

    `padding` is the space around each plot.

    Draw inside the ``with`` block: the style is in force only there.
    """
    with mpl.rc_context(_STYLE):
        layout = ConstrainedLayoutEngine(w_pad=padding, h_pad=padding)
        yield Figure(figsize=(width, height), layout=layout)


def svg_text(drawing: Figure, identity: str) -> str:
    """The figure as an ``<svg>`` element to be put into a page.

    `identity` keeps the ids of several drawings in one page apart, and makes them the same in every
    run, so that equal events give equal bytes.
    """
    buffer = io.StringIO()
    with mpl.rc_context({**_STYLE, "svg.hashsalt": identity}):
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        FigureCanvasSVG(drawing).print_svg(buffer, metadata=metadata)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # These ids name matplotlib's groups; nothing refers to them, and they repeat between figures.
    text = re.sub(r'<g id="[\w.]+"', "<g", text)
    text = re.sub(r'(<svg[^>]*?) width="[^"]+"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]+"', r"\1", text, count=1)
    for role, colour in asdict(LIGHT).items():
        text = text.replace(colour, f"var(--{role.replace('_', '-')})")
    return text


def png_bytes(drawing: Figure, *, dots_per_inch: int) -> bytes:
    """The figure as a PNG on a white surface."""
    buffer = io.BytesIO()
    drawing.set_dpi(dots_per_inch)
    with mpl.rc_context(_STYLE):
        FigureCanvasAgg(drawing).print_png(
            buffer,
            metadata={"Software": None},
            pil_kwargs={"dpi": (dots_per_inch, dots_per_inch)},
        )
    return buffer.getvalue()
