"""The report: one HTML file that needs nothing else, for people who did not watch the run."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from html import escape
from pathlib import Path

import numpy as np
import yaml
from matplotlib.axes import Axes

from integrations.report.facts import attention, duration_text, headline, tiles
from integrations.report.figures.close_up import draw_close_up
from integrations.report.figures.drift import draw_drift
from integrations.report.figures.learner import draw_learner, draw_warm_start
from integrations.report.figures.reward import draw_reward
from integrations.report.figures.staleness import (
    draw_off_policy,
    draw_staleness,
    draw_staleness_histogram,
)
from integrations.report.figures.swaps import draw_swap_latency, draw_swap_pause
from integrations.report.figures.timeline import (
    busy_share,
    draw_lanes,
    draw_throughput,
    replicas,
)
from integrations.report.markup import (
    card,
    clipped,
    disclosure,
    formatted,
    note,
    section,
    table,
)
from integrations.report.record import RunRecord, load_run
from integrations.report.style import style_sheet
from integrations.report.theme import figure, svg_text

__all__ = ["render_page", "save_report", "write_report"]

SAMPLES = 12
SAMPLE_CHARACTERS = 600
TABLE_ROWS = 200
HALF, FULL = 6.3, 12.9  # inches: a card in one of two columns, a card across the page

STATUS_WORDS = {"finished": "finished", "failed": "failed", "unfinished": "not finished"}

# Column of the step events, heading, format.
TABLE_COLUMNS = (
    ("version", "version", "d"),
    ("reward_mean", "reward", ".3f"),
    ("loss", "loss", ".4f"),
    ("entropy", "entropy", ".3f"),
    ("gradient_norm", "gradient norm", ".3f"),
    ("k3_kl", "k3 KL", ".3g"),
    ("max_abs_diff", "max |diff|", ".3g"),
    ("router_flip_rate", "router flips", ".3g"),
    ("staleness_mean", "staleness mean", ".2f"),
    ("staleness_max", "max", "d"),
    ("off_policy_k3_kl", "off-policy k3", ".4f"),
    ("clip_fraction", "clipped", ".2%"),
    ("tokens", "tokens", ",d"),
    ("learner_tokens_per_second", "learner tokens/s", ",.0f"),
)


def write_report(run_dir: Path | str, out: Path | str | None = None) -> Path:
    """Reads the run in `run_dir` and writes its report, by default to ``run_dir/report.html``.

    The file appears whole or not at all.

    Returns:
        the path of the report.

    Raises:
        ReportError: `run_dir` does not exist or holds no event.
        OSError: the report cannot be written.
    """
    return save_report(load_run(run_dir), out)


def save_report(run: RunRecord, out: Path | str | None = None) -> Path:
    """`write_report` for a run that is read already."""
    target = Path(out) if out is not None else run.folder / "report.html"
    page = render_page(run)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.write_text(page, encoding="utf-8")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def render_page(run: RunRecord) -> str:
    """The report as HTML text."""
    parts = [_header(run), _tiles(run)]
    if len(run.steps) or len(run.evaluations) or len(run.warm_start):
        parts.append(_learning(run))
    if len(run.steps):
        parts += [_drift(run), _staleness(run)]
    if len(run.swaps):
        parts.append(_swaps(run))
    if len(run.attempts_of_steps) or len(run.rollouts):
        parts.append(_time(run))
    if len(run.steps):
        parts.append(_optimisation(run))
    if len(run.samples):
        parts.append(_samples(run))
    parts.append(_appendix(run))
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(run.name)}: Lockstep run report</title>\n"
        f"<style>\n{style_sheet()}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _header(run: RunRecord) -> str:
    facts = []
    if run.started_wall is not None:
        began = datetime.datetime.fromtimestamp(run.started_wall, datetime.UTC)
        facts.append(("began", f"{began:%Y-%m-%d %H:%M} UTC"))
    facts.append(("took", duration_text(run.duration)))
    if run.parameters is not None:
        facts.append(("parameters", f"{run.parameters:,}"))
    if run.contract:
        facts.append(("contract", f'<span class="mono">{escape(run.contract)}</span>'))
    facts += [(escape(name), escape(value)) for name, value in run.versions.items()]
    if run.resumed_at:
        facts.append(
            ("resumed", "once" if len(run.resumed_at) == 1 else f"{len(run.resumed_at)} times")
        )
    notes = [note(text, alert=True) for text in attention(run)]
    if run.status == "unfinished":
        notes.append(
            note(
                "The run has not finished: it is still going on, or it was stopped. The figures are"
                " computed from the events so far."
            )
        )
    notes += [note(text) for text in run.notes]
    status = f'<span class="status {run.status}">{STATUS_WORDS[run.status]}</span>'
    listed = "".join(f"<span>{name} <b>{value}</b></span>" for name, value in facts)
    return (
        '<header>\n<p class="kicker">Lockstep run report</p>\n'
        f"<h1>{escape(run.name)}{status}</h1>\n"
        f'<p class="headline">{escape(headline(run))}</p>\n<p class="facts">{listed}</p>\n'
        + "\n".join(notes)
        + "\n</header>"
    )


def _tiles(run: RunRecord) -> str:
    shown = []
    for tile in tiles(run):
        unit = f" <small>{escape(tile.unit)}</small>" if tile.unit else ""
        shown.append(
            f'<div class="tile {tile.tone}"><div class="label">{escape(tile.label)}</div>'
            f'<div class="value">{escape(tile.value)}{unit}</div>'
            f'<div class="detail">{escape(tile.detail)}</div></div>'
        )
    return f'<section class="tiles" aria-label="Key figures">\n{chr(10).join(shown)}\n</section>'


def _single(draw: Callable[[Axes, RunRecord], None], run: RunRecord, height: float = 2.7) -> str:
    with figure(HALF, height) as drawing:
        draw(drawing.subplots(), run)
        return svg_text(drawing, draw.__name__)


def _stack(
    draw: Callable[[list[Axes], RunRecord], None],
    run: RunRecord,
    *,
    rows: int,
    columns: int = 1,
    width: float = HALF,
    height: float,
) -> str:
    with figure(width, height) as drawing:
        axes = np.asarray(drawing.subplots(rows, columns)).ravel().tolist()
        draw(axes, run)
        return svg_text(drawing, draw.__name__)


def _learning(run: RunRecord) -> str:
    cards = [
        card(
            "Reward against weight version",
            "Held-out prompts never occur in training.",
            _single(draw_reward, run),
            wide=len(run.warm_start) == 0,
        )
    ]
    if len(run.warm_start):
        cards.append(
            card(
                "Supervised warm start",
                "Loss on the tasks' own answers, before the first version.",
                _single(draw_warm_start, run),
            )
        )
    return section("Is it learning?", "Reward is the task's own score of an answer.", cards)


def _drift(run: RunRecord) -> str:
    lead = (
        "Sampled tokens are scored again by the learner under exactly the weight version that"
        " sampled them. Any difference is drift: kernels, routing or weights that disagree."
    )
    svg = _stack(draw_drift, run, rows=1, columns=3, width=FULL, height=2.1)
    unaudited = int(np.nansum(run.steps.column("unaudited_tokens")))
    audited = int(np.nansum(run.audited.column("audited_tokens")))
    text = (
        f"{audited:,} tokens scored again in {len(run.audited):,} of {len(run.steps):,} versions."
    )
    if unaudited:
        text += f" The weights of {unaudited:,} more tokens were no longer held."
    drift = card("Drift per weight version", text, svg, wide=True)
    return section("Do rollout and learner compute the same number?", lead, [drift])


def _staleness(run: RunRecord) -> str:
    lead = (
        "Staleness is not drift: it counts how many weight versions lie between the sampling of a"
        " trajectory and the training on it. Above zero means that rollout and learner really"
        " overlap."
    )
    return section(
        "How old is the training data?",
        lead,
        [
            card("Staleness of each training batch", "", _single(draw_staleness, run)),
            card("Batches by their oldest trajectory", "", _single(draw_staleness_histogram, run)),
            card(
                "What staleness costs",
                "Divergence between the weights being trained and those that sampled, and how much"
                " the loss cut away because of it.",
                _stack(draw_off_policy, run, rows=1, columns=2, width=FULL, height=2.4),
                wide=True,
            ),
        ],
    )


def _swaps(run: RunRecord) -> str:
    lead = (
        "New weights are staged while generation goes on and committed at a token boundary. Only"
        " the pause is time lost to generation."
    )
    return section(
        "How fast do new weights arrive?",
        lead,
        [
            card("Publish to committed", "", _single(draw_swap_latency, run)),
            card("Pause of generation per swap", "", _single(draw_swap_pause, run)),
        ],
    )


def _time(run: RunRecord) -> str:
    shares = [
        f"{name} busy {share:.0%} of the time"
        for name, share in (
            ("Learner", busy_share(run.attempts_of_steps)),
            ("rollout", busy_share(run.rollouts)),
        )
        if share is not None
    ]
    lanes = 1.5 + 0.3 * (4 + len(replicas(run)))
    with figure(FULL, lanes + 1.9) as drawing:
        upper, lower = drawing.subplots(2, 1, height_ratios=[lanes - 0.6, 1.9])
        draw_lanes(upper, run)
        draw_throughput(lower, run)
        upper.set_xlabel("")
        whole = svg_text(drawing, "timeline")
    with figure(FULL, 1.1 + 0.42 * (2 + len(replicas(run)))) as drawing:
        draw_close_up(drawing.subplots(), run)
        close_up = svg_text(drawing, "close_up")
    return section(
        "Who worked when?",
        (", ".join(shares) + ". " if shares else "")
        + "The two run in separate processes and meet only at a swap.",
        [
            card(
                "The whole run",
                "The lane of a rollout engine is filled as high as the engine was busy.",
                whole,
                wide=True,
            ),
            card(
                "Close-up of a few versions",
                "While the learner trains one version the engines serve an earlier one; a coloured"
                " line marks the token boundary at which new weights take over.",
                close_up,
                wide=True,
            ),
        ],
    )


def _optimisation(run: RunRecord) -> str:
    svg = _stack(draw_learner, run, rows=2, columns=2, width=FULL, height=4.2)
    lead = "Where there are two lines, the faint one is as recorded, the strong one a moving mean."
    return section("Is the optimisation healthy?", lead, [card("Learner", "", svg, wide=True)])


def _samples(run: RunRecord) -> str:
    rows = run.samples.rows
    picked = [rows[index] for index in _spread(len(rows), SAMPLES)]
    cells = [
        (
            formatted(row.get("version"), "d"),
            clipped(row.get("prompt"), SAMPLE_CHARACTERS),
            clipped(row.get("response"), SAMPLE_CHARACTERS),
            formatted(row.get("reward"), ".3g"),
        )
        for row in picked
    ]
    headings = (
        ("number", "version"),
        ("text", "prompt"),
        ("text", "response"),
        ("number", "reward"),
    )
    lead = f"{len(picked)} of {len(rows):,} recorded samples, spread over the run."
    return (
        f'<section>\n<h2>What does it write?</h2>\n<p class="lead">{lead}</p>\n'
        f'<div class="card scroll">{table(headings, cells)}</div>\n</section>'
    )


def _appendix(run: RunRecord) -> str:
    recipe = yaml.safe_dump(dict(run.recipe), sort_keys=False, allow_unicode=True)
    parts = [_version_table(run), disclosure("Resolved recipe", f"<pre>{escape(recipe)}</pre>")]
    source = escape(str(run.folder / "metrics.jsonl"))
    return (
        f"<section>\n<h2>Reference</h2>\n{chr(10).join(parts)}\n</section>\n"
        f'<footer>Drawn from <span class="mono">{source}</span>. All times are measured on the'
        " machine that ran it.</footer>"
    )


def _version_table(run: RunRecord) -> str:
    rows = run.steps.rows
    if not rows:
        return ""
    picked = [rows[index] for index in _spread(len(rows), TABLE_ROWS)]
    cells = [[formatted(row.get(key), form) for key, _, form in TABLE_COLUMNS] for row in picked]
    headings = [("number", title) for _, title, _ in TABLE_COLUMNS]
    title = "Every weight version in figures"
    if len(picked) < len(rows):
        title = f"{len(picked)} of {len(rows):,} weight versions in figures"
    return disclosure(title, table(headings, cells))


def _spread(count: int, limit: int) -> list[int]:
    """At most `limit` indices below `count`, evenly spread, both ends included."""
    return sorted({int(index) for index in np.linspace(0, count - 1, min(limit, count))})
