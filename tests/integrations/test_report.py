"""Reading runs and drawing them."""

from __future__ import annotations

import json
import re
import struct
from html.parser import HTMLParser

import numpy as np
import pytest

from integrations.report import ReportError, load_run, render_overview_png, write_report
from integrations.report import page as page_module
from integrations.report.facts import attention, headline, tiles
from integrations.report.figures.axes import thin
from integrations.report.table import Table
from integrations.report.theme import DARK, LIGHT

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Structure(HTMLParser):
    """Checks that elements nest, and collects texts, links and ids."""

    def __init__(self):
        super().__init__()
        self.open, self.texts, self.links, self.ids = [], [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href"):
                self.links.append(value)
            if name == "id":
                self.ids.append(value)

    def handle_startendtag(self, tag, attrs):
        if tag not in VOID:
            self.handle_starttag(tag, attrs)
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes <{self.open[-1:]}>"
        self.open.pop()

    def handle_data(self, data):
        self.texts.append(data)


def parse(path):
    page = Structure()
    page.feed(path.read_text(encoding="utf-8"))
    page.close()
    assert not page.open
    return page, " ".join(" ".join(page.texts).split())


@pytest.fixture(scope="module")
def finished(tmp_path_factory, request):
    """The page of a finished run of 60 versions; drawn once, it takes seconds."""
    events = request.getfixturevalue("events_of_a_finished_run")
    folder = tmp_path_factory.mktemp("finished")
    write_events(folder, events)
    return write_report(folder)


def write_events(folder, events):
    folder.mkdir(exist_ok=True)
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (folder / "metrics.jsonl").write_text(lines, encoding="utf-8")
    return folder


# ---------------------------------------------------------------- the page


def test_the_page_needs_nothing_but_itself(finished):
    page, _ = parse(finished)
    assert all(link.startswith("#") for link in page.links)
    text = finished.read_text(encoding="utf-8")
    assert not re.search(r"<script|<link|@import|url\((?!#)", text)
    assert len(page.ids) == len(set(page.ids)), "two plots share an id"
    referenced = set(re.findall(r"url\(#([^)]+)\)", text)) | {link[1:] for link in page.links}
    assert referenced <= set(page.ids)


def test_the_page_answers_every_question_of_a_stranger(finished):
    _, text = parse(finished)
    for words in (
        "quickstart",
        "finished",
        "5f0c9a1e22b7d314",
        "2.13.0+cpu",
        "60 weight versions trained",
        "Held-out reward rose from 0.312 to 0.922",
        "exactly 0 in 60 audited versions",
        "limit 2",
        "generation stopped for a swap",
        "tokens per second",
        "learner trains",
        "policy loss",
        "of 180 recorded samples",
        "Largest staleness",
        "held_out: 128",
    ):
        assert words in text, words


def test_no_colour_of_a_plot_is_fixed_to_the_light_setting(finished):
    text = finished.read_text(encoding="utf-8")
    plots = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert not re.findall(r"#[0-9a-f]{6}\b", plots)
    assert DARK.learner in text and LIGHT.learner in text


def test_equal_events_give_equal_bytes(finished):
    again = write_report(finished.parent, finished.with_name("again.html"))
    assert again.read_bytes() == finished.read_bytes()


def test_texts_of_a_model_cannot_become_markup(tmp_path, make_events):
    events = make_events(versions=2)
    sample = {"event": "sample", "t": 1, "version": 2, "reward": 0.0}
    attack = {"prompt": "<script>alert(1)</script>", "response": '&lt; "x" </td>'}
    events.insert(-1, sample | attack)
    write_events(tmp_path, events)
    page = write_report(tmp_path)
    assert "<script>" not in page.read_text(encoding="utf-8")
    _, text = parse(page)
    assert "<script>alert(1)</script>" in text


def test_drift_that_is_not_zero_is_said_and_never_called_exact(tmp_path, make_events):
    page = write_report(write_events(tmp_path, make_events(versions=6, drift=0.02)))
    _, text = parse(page)
    assert "Drift is not zero" in text
    assert "exactly 0" not in text and "agreed exactly" not in text


def test_zeros_of_steps_without_an_audit_are_not_called_exact(tmp_path, make_events):
    events = make_events(versions=4)
    for event in events:
        if event["event"] == "step":
            event["audited_tokens"] = 0.0
        if event["event"] == "run_finished":
            event["summary"] |= {"k3_kl": None, "max_abs_diff": None, "router_flip_rate": None}
    run = load_run(write_events(tmp_path, events))
    assert len(run.audited) == 0 and not run.drift_is_zero
    assert run.summary["k3_kl"] is None
    figures = {tile.label: (tile.value, tile.tone) for tile in tiles(run)}
    assert figures["k3 KL, rollout to learner"] == ("not measured", "plain")
    assert figures["Router flips"] == ("not measured", "plain")
    assert "agreed" not in headline(run)


def test_a_long_run_stays_a_small_page(tmp_path, make_events):
    page = write_report(write_events(tmp_path, make_events(versions=2000)))
    assert page.stat().st_size < 1_100_000
    _, text = parse(page)
    assert "2,000 weight versions trained" in text and "200 of 2,000 weight versions" in text


def test_the_page_appears_whole_or_not_at_all(tmp_path, make_events, monkeypatch):
    folder = write_events(tmp_path / "run", make_events(versions=1))
    monkeypatch.setattr(page_module, "render_page", lambda run: "a page")
    with pytest.raises(FileNotFoundError):
        write_report(folder, tmp_path / "missing" / "report.html")
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.jsonl"]


# ---------------------------------------------------------------- damaged, failed, resumed runs


@pytest.mark.parametrize("share", [0.0, 0.5, 0.7, 0.98])
def test_a_run_can_be_drawn_after_any_number_of_events(tmp_path, make_events, share):
    events = make_events(versions=5)
    events = events[: 1 + int(share * (len(events) - 2))]
    _, text = parse(write_report(write_events(tmp_path, events)))
    assert "not finished" in text


@pytest.mark.parametrize(
    "kinds", [("run_started", "rollout"), ("step", "model"), ("swap", "evaluation", "warm_start")]
)
def test_a_run_can_be_drawn_without_some_kinds_of_event(tmp_path, make_events, kinds):
    events = [event for event in make_events(versions=3) if event["event"] not in kinds]
    parse(write_report(write_events(tmp_path, events)))


def test_a_run_can_be_drawn_when_fields_are_missing_null_or_not_a_number(tmp_path, make_events):
    events = make_events(versions=4)
    damage = (None, float("nan"), float("inf"), "text", [1])
    for number, event in enumerate(events):
        for name in list(event)[3:]:
            if (number + len(name)) % 4 == 0:
                event[name] = damage[(number + len(name)) % len(damage)]
    parse(write_report(write_events(tmp_path, events)))


def test_an_unfinished_last_line_is_left_out_and_mentioned(tmp_path, make_events):
    folder = write_events(tmp_path, make_events(versions=3))
    whole = load_run(folder)
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"event": "step", "version": 4, "lo')
    run = load_run(folder)
    assert len(run.steps) == len(whole.steps)
    assert any("1 line of metrics.jsonl could not be read" in note for note in run.notes)
    assert not whole.notes


def test_bytes_that_are_not_text_are_left_out(tmp_path, make_events):
    folder = write_events(tmp_path, make_events(versions=1))
    data = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(b"\xff\xfe\x00\n[1]\n42\n" + data)
    assert any("3 lines" in note for note in load_run(folder).notes)


def test_a_resumed_run_counts_every_version_once_and_every_second_twice(tmp_path, make_events):
    run = load_run(write_events(tmp_path, make_events(versions=20, killed_at=13)))
    assert run.steps.column("version").tolist() == list(range(1, 21))
    assert len(run.attempts_of_steps) == 23
    assert len(run.resumed_at) == 1
    assert run.status == "finished"
    assert any("3 versions were trained again" in note for note in run.notes)
    assert run.summary["trajectories"] == 20 * 128
    # The last training of a version counts.
    last = [row for row in run.attempts_of_steps.rows if row["version"] == 11][-1]
    assert run.steps.rows[10] is last


def test_a_run_that_failed_and_was_resumed_is_not_called_failed(tmp_path, make_events):
    events = make_events(versions=4, failure="learner: loss is not finite in step 5")
    assert load_run(write_events(tmp_path, events)).status == "failed"
    events.append({"event": "run_started", "t": 30.0, "resumed": True})
    run = load_run(write_events(tmp_path, events))
    assert run.status == "unfinished" and run.reason is None


def test_the_reason_of_a_failure_heads_the_page(tmp_path, make_events):
    events = make_events(versions=4, failure="learner: loss is not finite in step 5")
    run = load_run(write_events(tmp_path, events))
    assert attention(run) == ["The run failed: learner: loss is not finite in step 5"]


def test_a_step_whose_loss_is_not_a_number_needs_attention(tmp_path, make_events):
    events = make_events(versions=4)
    next(event for event in events if event["event"] == "step")["loss"] = None
    run = load_run(write_events(tmp_path, events))
    assert attention(run) == ["loss is not a number in 1 version, the first being version 1."]


def test_the_summary_of_an_unfinished_run_comes_from_its_events(tmp_path, make_events):
    events = make_events(versions=10)
    finished = load_run(write_events(tmp_path / "whole", events)).summary
    run = load_run(write_events(tmp_path / "cut", events[:-1]))
    assert run.status == "unfinished"
    for key in ("k3_kl", "max_abs_diff", "router_flip_rate", "max_staleness", "swaps",
                "trajectories"):  # fmt: skip
        assert run.summary[key] == finished[key], key
    swaps = [e["swap_seconds"] for e in events if e["event"] == "swap" and e["version"] > 0]
    assert run.summary["swap_seconds_p50"] == pytest.approx(float(np.median(swaps)))
    assert run.summary["lost"] is None


def test_a_folder_without_a_run_is_one_clear_error(tmp_path):
    with pytest.raises(ReportError, match="no such directory"):
        load_run(tmp_path / "nowhere")
    with pytest.raises(ReportError, match=r"no metrics.jsonl there"):
        load_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("\n")
    with pytest.raises(ReportError, match="holds no event yet"):
        load_run(tmp_path)


# ---------------------------------------------------------------- pieces


def test_the_picture_is_a_png_of_the_promised_size(tmp_path, make_events):
    folder = write_events(tmp_path, make_events(versions=12))
    data = render_overview_png(folder, tmp_path / "overview.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (1760, 992)


def test_thinning_keeps_the_ends_the_lowest_and_the_highest():
    x = np.arange(10_000, dtype=np.float64)
    y = np.sin(x / 50)
    y[4321], y[8765] = 9.0, -9.0
    thin_x, thin_y = thin(x, y, 200)
    assert thin_x.size <= 202
    assert {0.0, 4321.0, 8765.0, 9999.0} <= set(thin_x.tolist())
    assert (thin_y == y[thin_x.astype(int)]).all()


def test_a_column_turns_everything_that_is_no_finite_number_into_nan():
    rows = [{"x": 1}, {"x": None}, {}, {"x": "2"}, {"x": True}, {"x": float("inf")}, {"x": 0.5}]
    column = Table(rows).column("x")
    assert np.isfinite(column).tolist() == [True, False, False, False, False, False, True]
    assert column[[0, 6]].tolist() == [1.0, 0.5]


def test_the_last_row_per_value_wins_and_the_order_is_that_of_the_column():
    table = Table([{"v": 2, "n": 1}, {"v": 1, "n": 2}, {"v": 2, "n": 3}, {"v": None}])
    assert [row["n"] for row in table.last_per("v").rows] == [2, 3]
