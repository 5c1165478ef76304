"""Who worked when? The whole run in lanes, its throughput, and a close-up of a few versions."""

from __future__ import annotations

from typing import TypeGuard

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from integrations.report.figures.axes import close_up_to_zero, say
from integrations.report.record import RunRecord
from integrations.report.table import Floats, Table
from integrations.report.theme import LIGHT

__all__ = ["busy_share", "draw_close_up", "draw_lanes", "draw_throughput"]

BINS = 500
LANE = 0.72
CLOSE_UP_VERSIONS = 5


def draw_lanes(axes: Axes, run: RunRecord, *, compact: bool = False) -> None:
    """Lanes of work of learner and rollout replicas; swaps, checkpoints, evaluations as marks."""
    replicas = _replicas(run)
    names = ["learner", *_replica_names(replicas), "swaps"]
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
    for name, replica in zip(_replica_names(replicas), replicas, strict=True):
        _busy_area(axes, run.rollouts.where(run.rollouts.column("replica") == replica), rows[name],
                   run.duration)  # fmt: skip
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
            "resumed", (resumed, 1), xycoords=("data", "axes fraction"), xytext=(3, -1),
            textcoords="offset points", va="top", color=LIGHT.alert,
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


def draw_close_up(axes: Axes, run: RunRecord) -> None:
    """A few versions from the middle: what the learner trains while the engines serve what."""
    window = _window(run)
    if window is None:
        say(axes, "a close-up needs at least two trained versions and their swaps")
        return
    begin, end = window
    replicas = _replicas(run)
    names = ["learner trains", "weights travel", *(f"{n} serves" for n in _replica_names(replicas))]
    rows = {name: len(names) - 1 - index for index, name in enumerate(names)}
    for row in run.attempts_of_steps.rows:
        _labelled(axes, row.get("started"), row.get("ended"), rows["learner trains"],
                  row.get("version"), LIGHT.learner, window)  # fmt: skip
    for index, replica in enumerate(replicas):
        own = run.swaps.where(run.swaps.column("replica") == replica).sorted_by("committed").rows
        lane = rows[names[2 + index]]
        for row, following in zip(own, [*own[1:], {"committed": run.duration}], strict=True):
            _labelled(axes, row.get("committed"), following.get("committed"), lane,
                      row.get("version"), LIGHT.rollout, window)  # fmt: skip
    for row in run.swaps.rows:
        announced, committed = row.get("announced"), row.get("committed")
        if not (_number(announced) and _number(committed)) or committed < begin or announced > end:
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
    replicas = max(1, np.unique(spans.column("replica")[known]).size)
    total = (ended[known].max() - started[known].min()) * replicas
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


def _replicas(run: RunRecord) -> list[float]:
    seen = np.concatenate([run.rollouts.column("replica"), run.swaps.column("replica")])
    return sorted(set(seen[np.isfinite(seen)].tolist())) or [0.0]


def _replica_names(replicas: list[float]) -> list[str]:
    if len(replicas) == 1:
        return ["rollout"]
    return [f"rollout {int(replica)}" for replica in replicas]


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
            if _number(row.get("started")) and _number(row.get("ended")))  # fmt: skip
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


def _window(run: RunRecord) -> tuple[float, float] | None:
    """From the beginning to the end of a few consecutive versions in the middle of the run."""
    spans = run.steps.where(
        np.isfinite(run.steps.column("started")) & np.isfinite(run.steps.column("ended"))
    )
    committed = run.swaps.column("committed")
    if len(spans) < 2 or not np.isfinite(committed).any():
        return None
    first = max(0, (len(spans) - CLOSE_UP_VERSIONS) // 2)
    chosen = spans.rows[first : first + CLOSE_UP_VERSIONS]
    begin, end = float(chosen[0]["started"]), float(chosen[-1]["ended"])
    if any(begin < resumed < end for resumed in run.resumed_at):
        return None
    margin = (end - begin) * 0.02
    return begin - margin, end + margin


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
    if not (_number(begin) and _number(end)):
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


def _number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and bool(np.isfinite(value))
