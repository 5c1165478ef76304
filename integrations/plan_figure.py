"""The schedule of a simulated plan as one picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap

from integrations.report.theme import LIGHT, figure, png_bytes
from weightplane.simulate import Simulation

__all__ = ["save_schedule_png"]

_BINS = 480


def save_schedule_png(simulation: Simulation, out: Path) -> None:
    """Draws who receives when, how busy the ranks are, and how many bytes each moves.

    Raises:
        OSError: the picture cannot be written.
    """
    plan = simulation.plan
    with figure(11, 6.4, padding=0.1) as drawing:
        panels = drawing.subplot_mosaic([["who", "who"], ["busy", "bytes"]], height_ratios=[3, 2])
        panels["who"].set_title(
            f"{plan.source.size} trainer ranks to {plan.destination.size} rollout ranks: "
            f"{plan.wire_bytes / 1e9:,.0f} GB in {simulation.seconds * 1e3:,.1f} ms, "
            f"{simulation.bandwidth_fraction:.1%} of the bandwidth bound",
            weight="bold",
        )
        _draw_receivers(panels["who"], simulation)
        panels["busy"].set_title("Share of the ranks that are busy", weight="bold")
        _draw_shares(panels["busy"], simulation)
        panels["bytes"].set_title("Bytes per rank, sorted", weight="bold")
        _draw_bytes(panels["bytes"], simulation)
        drawing.set_facecolor("white")
        out.write_bytes(png_bytes(drawing, dots_per_inch=150))


def _draw_receivers(axes: Axes, simulation: Simulation) -> None:
    """One row per rollout rank: what it receives, from a trainer or from another rollout rank."""
    plan = simulation.plan
    width = max(simulation.seconds, 1e-12) / _BINS
    relayed = plan.hop_depends_on >= 0
    row = plan.hop_receiver - plan.source.size
    first = np.minimum((simulation.begin / width).astype(np.int64), _BINS - 1)
    ended = simulation.end - simulation.cluster.hop_seconds
    last = np.minimum((ended / width).astype(np.int64), _BINS - 1)
    picture = np.zeros((plan.destination.size, _BINS), np.int8)
    for kind, chosen in ((1, ~relayed), (2, relayed)):
        # A rise where a hop begins and a fall after it ends; their running sum is where it lasts.
        steps = np.zeros((plan.destination.size, _BINS + 1), np.int64)
        np.add.at(steps, (row[chosen], first[chosen]), 1)
        np.add.at(steps, (row[chosen], last[chosen] + 1), -1)
        picture[np.cumsum(steps, axis=1)[:, :-1] > 0] = kind
    axes.imshow(
        picture, aspect="auto", interpolation="nearest", origin="upper",
        extent=(0.0, simulation.seconds * 1e3, plan.destination.size, 0.0),
        cmap=ListedColormap([LIGHT.surface, LIGHT.learner, LIGHT.rollout]), vmin=0, vmax=2,
    )  # fmt: skip
    axes.set_xlabel("milliseconds")
    axes.set_ylabel("rollout rank")
    axes.grid(visible=False)
    for colour, text in ((LIGHT.learner, "from a trainer"), (LIGHT.rollout, "from a relay")):
        axes.plot([], [], color=colour, linewidth=6, label=text)
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2)


def _draw_shares(axes: Axes, simulation: Simulation) -> None:
    edges, receiving = simulation.busy_fraction(receivers=True)
    _, sending = simulation.busy_fraction(receivers=False)
    middle = (edges[1:] + edges[:-1]) * 500
    axes.plot(middle, receiving.sum(axis=0), color=LIGHT.held_out, label="receive")
    axes.plot(middle, sending.sum(axis=0), color=LIGHT.swap, label="send")
    axes.set_xlabel("milliseconds")
    axes.set_ylim(0, 1.08)
    axes.legend(loc="lower right")


def _draw_bytes(axes: Axes, simulation: Simulation) -> None:
    plan = simulation.plan
    sources = plan.source.size
    for values, colour, text in (
        (plan.ingress_bytes[sources:], LIGHT.held_out, "rollout, received"),
        (plan.egress_bytes[sources:], LIGHT.rollout, "rollout, relayed"),
        (plan.egress_bytes[:sources], LIGHT.learner, "trainer, sent"),
    ):
        share = np.linspace(0, 100, len(values)) if len(values) > 1 else np.array([0.0])
        axes.plot(share, np.sort(values)[::-1] / 1e9, color=colour, label=text)
    axes.set_xlabel("percent of the ranks")
    axes.set_ylabel("GB")
    axes.set_ylim(bottom=0)
    axes.legend(loc="center right")
