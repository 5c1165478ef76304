"""How old is the data? Versions between sampling a token and training on it."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from integrations.report.figures.axes import DISTINCT, line, say, trend, version_axis
from integrations.report.record import RunRecord
from integrations.report.theme import LIGHT

__all__ = ["draw_off_policy", "draw_staleness", "draw_staleness_histogram"]


def draw_staleness(axes: Axes, run: RunRecord) -> None:
    """Mean and largest staleness of every training batch, and the limit that admission enforces."""
    x = run.steps.column("version")
    mean, largest = run.steps.column("staleness_mean"), run.steps.column("staleness_max")
    many = x.size > DISTINCT
    drawn = line(
        axes, x, largest, LIGHT.swap, drawstyle="steps-mid", label="largest in batch",
        linewidth=0.6 if many else 1.1, alpha=0.35 if many else 1.0,
    )  # fmt: skip
    drawn |= trend(axes, x, mean, LIGHT.learner, linewidth=2.0, label="mean of batch")
    if not drawn:
        say(axes, "no training step yet")
        return
    top = float(np.nanmax(np.concatenate([mean, largest])))
    limit = run.staleness_limit
    if limit is not None:
        top = max(top, limit)
        axes.axhline(limit, color=LIGHT.muted, linewidth=1.1, linestyle=(0, (4, 3)), zorder=1)
        axes.annotate(
            f"limit {limit}", (1, limit), xycoords=("axes fraction", "data"),
            xytext=(0, 3), textcoords="offset points", ha="right", color=LIGHT.muted,
        )  # fmt: skip
    axes.set_ylim(-0.05 * max(top, 1), max(top, 1) * 1.42)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.set_ylabel("versions")
    axes.legend(loc="upper left", ncols=2, borderaxespad=0.1)
    version_axis(axes)


def draw_staleness_histogram(axes: Axes, run: RunRecord) -> None:
    """Share of training batches by the staleness of their oldest trajectory."""
    largest = run.steps.column("staleness_max")
    largest = largest[np.isfinite(largest)].astype(np.int64)
    if largest.size == 0:
        say(axes, "no training step yet")
        return
    counts = np.bincount(largest)
    share = counts / counts.sum()
    bars = axes.bar(np.arange(counts.size), share, width=0.62, color=LIGHT.swap)
    axes.bar_label(bars, [f"{value:.0%}" for value in share], padding=2, color=LIGHT.ink)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_yticks([])
    axes.set_ylim(0, float(share.max()) * 1.2)
    axes.set_xlim(-0.6, max(counts.size - 1, run.staleness_limit or 0) + 0.6)
    axes.set_xlabel("largest staleness (versions)")
    axes.set_ylabel("share of batches")


def draw_off_policy(axes_list: list[Axes], run: RunRecord) -> None:
    """What staleness does to the learner: divergence from the data, and what the correction did."""
    x = run.steps.column("version")
    divergence, shares = axes_list
    divergence.set_title("k3 KL, learner's weights against the sampling weights")
    if trend(divergence, x, run.steps.column("off_policy_k3_kl"), LIGHT.learner):
        divergence.set_ylim(bottom=0)
        divergence.set_ylabel("nats")
        divergence.yaxis.set_major_locator(MaxNLocator(nbins=4))
    else:
        say(divergence, "not recorded")
    version_axis(divergence)
    shares.set_title("share of tokens")
    drawn = trend(shares, x, run.steps.column("clip_fraction"), LIGHT.swap, label="clipped")
    drawn |= trend(
        shares, x, run.steps.column("masked_fraction"), LIGHT.rollout,
        linestyle=(0, (4, 2)), label="masked or capped",
    )  # fmt: skip
    if drawn:
        low, high = shares.get_ylim()
        shares.set_ylim(min(low, 0.0), max(high, 1e-3) * 1.35)
        shares.yaxis.set_major_formatter(PercentFormatter(1.0))
        shares.yaxis.set_major_locator(MaxNLocator(nbins=4))
        shares.legend(loc="upper left", ncols=2, borderaxespad=0.1)
    else:
        say(shares, "not recorded")
    version_axis(shares)
