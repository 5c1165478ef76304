"""Who worked when? The whole run in lanes, and its throughput."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from integrations.report.figures.axes import close_up_to_zero, say
from integrations.report.record import RunRecord
from integrations.report.table import Floats, Table, is_number
from integrations.report.theme import LIGHT

__all__ = ["LANE", "busy_share", "draw_lanes", "draw_throughput", "replicas"]

BINS = 500
LANE = 0.72


def draw_lanes(axes: Axes, run: RunRecord, *, compact: bool = False) -> None:
    """Lanes of work of learner and rollout replicas; swaps, checkpoints, evaluations as marks."""
    engines = replicas(run)
    names = ["learner", *engines, "swaps"]
    if not compact:
        names += ["checkpoints", "evaluations"]
    if run.duration <= 0 or (len(run.attempts_of_steps) == 0 and len(run.rollouts) == 0):
        say(axes, "nothing has run yet")
        return
    rows = {name: len(names) - 1 - index for index, name in enumerate(names)}
    width = run.duration / 1400
    _warm_start(axes, run, rows["learner"], compact=compact)
    spans = _spans(run.attempts_of_steps, merge=width)
    _bars(axes, spans, rows["learner"], LIGHT.learner, least=width)
    for name, replica in engines.items():
        own = run.rollouts.matching("replica", replica)
        _busy_area(axes, own, rows[name], run.duration)
    _ticks(axes, run.swaps.column("committed"), rows["swaps"], LIGHT.swap, run.duration)
    if not compact:
        for name, table in (("checkpoints", run.checkpoints), ("evaluations", run.evaluations)):
            times = _slots(table.column("t"), run.duration, 240)
            colour = LIGHT.muted if name == "checkpoints" else LIGHT.held_out
            marker = "s" if name == "checkpoints" else "o"
            axes.plot(
                times, np.full_like(times, rows[name]), linestyle="none", marker=marker,
                markersize=4.5, color=colour,
            )  # fmt: skip
    for resumed in run.resumed_at:
        axes.axvline(resumed, color=LIGHT.alert, linewidth=1.1, linestyle=(0, (3, 2)))
        axes.annotate(
            "resumed", (resumed, 1), xycoords=("data", "axes fraction"), xytext=(0, 2),
            textcoords="offset points", ha="center", va="bottom", color=LIGHT.alert,
        )  # fmt: skip
    axes.set_yticks(list(rows.values()), list(rows))
    axes.tick_params(axis="y", labelcolor=LIGHT.ink)
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.grid(visible=False)
    time_axis(axes, run.duration)


def draw_throughput(axes: Axes, run: RunRecord) -> None:
    """Tokens per second of the rollout engines together and of the learner, against time."""
    series: list[tuple[Floats, Floats, str, str]] = []
    if len(run.rollouts):
        edges, tokens = _per_bin(run.rollouts, "tokens", run.duration, bins=150)
        series.append((edges, tokens / np.diff(edges), LIGHT.rollout, "rollout, sampled tokens"))
    if len(run.attempts_of_steps):
        edges, tokens = _per_bin(run.attempts_of_steps, "tokens", run.duration, bins=150)
        busy = _covered(run.attempts_of_steps, edges)
        rate = np.divide(tokens, busy, out=np.full_like(tokens, np.nan), where=busy > 0)
        series.append((edges, rate, LIGHT.learner, "learner while busy"))
    if not series:
        say(axes, "no tokens yet")
        return
    for edges, rate, colour, label in series:
        middle = (edges[:-1] + edges[1:]) / 2
        shown = np.where(rate > 0, rate, np.nan)
        axes.plot(middle, shown, color=colour, label=label)
    top = max(float(np.nanmax(np.where(np.isfinite(rate), rate, 0))) for _, rate, _, _ in series)
    close_up_to_zero(axes, top * 1.15)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_ylabel("tokens per second")
    axes.legend(loc="upper left", ncols=2, borderaxespad=0.1)
    time_axis(axes, run.duration)


def replicas(run: RunRecord) -> dict[str, str]:
    """The rollout engines of a run: name of the lane to the label in the events."""
    labels = sorted({*run.rollouts.texts("replica"), *run.commits.texts("replica")} - {""})
    if len(labels) <= 1:
        return {"rollout": labels[0] if labels else ""}
    return {f"rollout {label}" if label.isdigit() else label: label for label in labels}


def busy_share(spans: Table) -> float | None:
    """Busy time over the time between the first beginning and the last end; None without spans.

    Rollout rows state their busy seconds; a learner's row is busy from `started` to `ended`.
    """
    started, ended = spans.column("started"), spans.column("ended")
    known = np.isfinite(started) & np.isfinite(ended)
    if not known.any():
        return None
    busy = spans.column("busy_seconds")
    busy = np.where(np.isfinite(busy), busy, ended - started)[known].sum()
    workers = max(1, len(set(spans.texts("replica"))))
    total = (ended[known].max() - started[known].min()) * workers
    return min(1.0, float(busy / total)) if total > 0 else None


def time_axis(axes: Axes, duration: float) -> None:
    """Seconds, minutes or hours since the run began, whichever reads best."""
    scale, unit = next(
        (scale, unit)
        for limit, scale, unit in (
            (300, 1, "seconds"),
            (10_800, 60, "minutes"),
            (np.inf, 3600, "hours"),
        )
        if duration <= limit
    )
    axes.set_xlim(0, duration)
    steps = MaxNLocator(nbins=10, steps=[1, 2, 3, 5, 6, 10])
    ticks = np.array(steps.tick_values(0, duration / scale)) * scale
    ticks = ticks[(ticks >= 0) & (ticks <= duration)]
    axes.set_xticks(ticks, [f"{tick / scale:g}" for tick in ticks])
    axes.set_xlabel(f"{unit} since the run began")


def _spans(table: Table, *, merge: float) -> list[tuple[float, float]]:
    """Beginnings and lengths of busy spans; neighbours closer than `merge` become one."""
    pairs = np.column_stack([table.column("started"), table.column("ended")])
    pairs = pairs[np.isfinite(pairs).all(axis=1)]
    spans: list[list[float]] = []
    for started, ended in pairs[np.argsort(pairs[:, 0])]:
        if spans and started - spans[-1][1] < merge:
            spans[-1][1] = max(spans[-1][1], float(ended))
        else:
            spans.append([float(started), float(ended)])
    return [(started, ended - started) for started, ended in spans]


def _bars(
    axes: Axes, spans: list[tuple[float, float]], row: int, colour: str, *, least: float
) -> None:
    shown = [(started, max(length, least)) for started, length in spans]
    axes.broken_barh(shown, (row - LANE / 2, LANE), facecolors=colour, linewidth=0)


def _warm_start(axes: Axes, run: RunRecord, row: int, *, compact: bool) -> None:
    times = run.warm_start.column("t")
    times = times[np.isfinite(times)]
    if times.size < 2:
        return
    begin, end = float(times.min()), float(times.max())
    if any(begin < resumed < end for resumed in run.resumed_at):
        return  # a warm start in two attempts is no single span
    axes.broken_barh(
        [(begin, end - begin)], (row - LANE / 2, LANE), facecolors="none",
        edgecolors=LIGHT.learner, hatch="////", linewidth=0.8,
    )  # fmt: skip
    if (end - begin) > run.duration * (0.14 if compact else 0.06):
        axes.text(
            (begin + end) / 2, row, "warm start", ha="center", va="center", color=LIGHT.ink,
            bbox={"facecolor": LIGHT.surface, "edgecolor": "none", "pad": 1.5},
        )  # fmt: skip


def _per_bin(table: Table, column: str, duration: float, bins: int) -> tuple[Floats, Floats]:
    """Spreads the amount in `column` of each row evenly over the row's span; sums it per bin."""
    started, ended = table.column("started"), table.column("ended")
    amount = table.column(column)
    known = np.isfinite(started) & np.isfinite(ended) & np.isfinite(amount) & (ended > started)
    started, ended, amount = started[known], ended[known], amount[known]
    edges = np.linspace(0, duration, bins + 1)
    if started.size == 0:
        return edges, np.zeros(bins)
    # The amount up to an instant is a sum of ramps, one per row; a bin holds a difference of it.
    total = np.zeros(edges.size)
    for begin, end, value in zip(started, ended, amount, strict=True):
        first, last = np.searchsorted(edges, (begin, end))
        total[first:last] += value * (edges[first:last] - begin) / (end - begin)
        total[last:] += value
    return edges, np.diff(total)


def _covered(table: Table, edges: Floats) -> Floats:
    """Seconds of each bin that lie within a row's span."""
    rows = ({**row, "length": row["ended"] - row["started"]} for row in table.rows
            if is_number(row.get("started")) and is_number(row.get("ended")))  # fmt: skip
    return _per_bin(Table(rows), "length", float(edges[-1]), edges.size - 1)[1]


def _busy_area(axes: Axes, rollouts: Table, row: int, duration: float) -> None:
    """A lane filled as high as the engine was busy."""
    bins = min(BINS, max(20, len(rollouts)))
    edges, busy = _per_bin(rollouts, "busy_seconds", duration, bins)
    share = np.clip(busy / np.diff(edges), 0, 1)
    axes.fill_between(
        np.repeat(edges, 2)[1:-1], row - LANE / 2, row - LANE / 2 + LANE * np.repeat(share, 2),
        color=LIGHT.rollout, linewidth=0,
    )  # fmt: skip


def _ticks(axes: Axes, times: Floats, row: int, colour: str, duration: float) -> None:
    times = _slots(times, duration, 1000)
    width = 1.1 if times.size < 200 else 0.6
    axes.vlines(times, row - LANE / 2, row + LANE / 2, color=colour, linewidth=width)


def _slots(times: Floats, duration: float, count: int) -> Floats:
    """One time per slot of `duration` / `count`: marks closer than that cover each other."""
    times = times[np.isfinite(times)]
    if times.size <= count:
        return times
    return np.unique(np.round(times / duration * count)) * duration / count
