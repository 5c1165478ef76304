"""Observers of a run: JSON lines, TensorBoard, the live view and log lines."""

from __future__ import annotations

import io
import json
import os

import numpy as np
import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from integrations.trainer.observers import (
    JsonlObserver,
    LiveObserver,
    LogObserver,
    ObserverGroup,
    TensorBoardObserver,
)


def refuse_constant(name):
    raise ValueError(f"{name} is not JSON")


def strict_lines(path):
    text = path.read_text(encoding="utf-8")
    return [json.loads(line, parse_constant=refuse_constant) for line in text.splitlines()]


def scalars(folder):
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {
        tag: [(point.step, point.value) for point in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


# ---------------------------------------------------------------- JSON lines


def test_every_event_is_one_line_that_reads_back_equal(tmp_path, make_events):
    events = make_events(versions=4)
    observer = JsonlObserver(tmp_path / "new" / "metrics.jsonl")
    for event in events:
        observer(event)
    observer.close()
    assert strict_lines(tmp_path / "new" / "metrics.jsonl") == events


def test_not_a_number_and_infinity_become_null_at_any_depth(tmp_path):
    path = tmp_path / "metrics.jsonl"
    observer = JsonlObserver(path)
    observer({"event": "step", "loss": float("nan"), "deep": [{"x": float("-inf"), "y": 1.5}]})
    observer.close()
    assert strict_lines(path) == [{"event": "step", "loss": None, "deep": [{"x": None, "y": 1.5}]}]


@pytest.mark.parametrize("number", [np.float32(0.5), np.int64(3), torch.tensor(0.25)])
def test_numbers_of_numpy_and_torch_are_written_as_numbers(tmp_path, number):
    path = tmp_path / "metrics.jsonl"
    observer = JsonlObserver(path)
    observer({"event": "step", "value": number})
    observer.close()
    assert strict_lines(path) == [{"event": "step", "value": number.item()}]


def test_a_line_that_a_killed_process_left_unfinished_does_not_swallow_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "step", "vers', encoding="utf-8")
    observer = JsonlObserver(path)
    observer({"event": "run_started"})
    observer.close()
    assert path.read_text(encoding="utf-8").splitlines()[1:] == ['{"event": "run_started"}']


def test_each_event_is_written_at_once_by_a_single_write(tmp_path, monkeypatch):
    writes = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: writes.append(data) or write(fd, data))
    observer = JsonlObserver(tmp_path / "metrics.jsonl")
    observer({"event": "sample", "response": "two\nlines \u2603 \ud800"})
    assert len(writes) == 1 and writes[0].count(b"\n") == 1
    assert len(strict_lines(tmp_path / "metrics.jsonl")) == 1
    observer.close()


def test_a_full_disk_raises_an_error_that_names_the_file():
    observer = JsonlObserver("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as caught:
        observer({"event": "step"})
    assert caught.value.filename == "/dev/full"
    observer.close()


def test_no_file_appears_before_the_first_event(tmp_path):
    observer = JsonlObserver(tmp_path / "run" / "metrics.jsonl")
    observer.close()
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- groups


def test_a_group_passes_events_in_order_and_closes_everyone_even_after_an_error():
    seen = []

    class Probe:
        def __init__(self, name, fail=False):
            self.name, self.fail = name, fail

        def __call__(self, event):
            seen.append((self.name, event["event"]))

        def close(self):
            seen.append((self.name, "closed"))
            if self.fail:
                raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        with ObserverGroup(Probe("a", fail=True), Probe("b")) as group:
            group({"event": "step"})
    assert seen == [("a", "step"), ("b", "step"), ("a", "closed"), ("b", "closed")]


# ---------------------------------------------------------------- TensorBoard


def test_scalars_are_grouped_and_drawn_over_the_weight_version(tmp_path, make_events):
    observer = TensorBoardObserver(tmp_path)
    events = make_events(versions=12)
    for event in events:
        observer(event)
    observer.close()
    found = scalars(tmp_path)
    groups = {tag.split("/")[0] for tag in found}
    assert groups == {"reward", "drift", "staleness", "swap", "throughput", "learner"}
    steps = [event for event in events if event["event"] == "step"]
    expected = [(event["version"], event["reward_mean"]) for event in steps]
    assert [step for step, _ in found["reward/training"]] == [step for step, _ in expected]
    assert np.allclose([y for _, y in found["reward/training"]], [y for _, y in expected])
    assert all(value == 0 for _, value in found["drift/k3_kl"])


def test_a_step_without_an_audit_has_no_point_in_the_drift_plots(tmp_path):
    observer = TensorBoardObserver(tmp_path)
    observer({"event": "step", "version": 1, "k3_kl": 0.0, "audited_tokens": 0.0, "loss": 1.0})
    observer({"event": "step", "version": 2, "k3_kl": 0.5, "audited_tokens": 9.0, "loss": 1.0})
    observer.close()
    found = scalars(tmp_path)
    assert found["drift/k3_kl"] == [(2, 0.5)]
    assert [step for step, _ in found["learner/loss"]] == [1, 2]


def test_a_resumed_run_replaces_what_it_trains_again(tmp_path):
    first = TensorBoardObserver(tmp_path)
    for version in range(1, 8):
        first({"event": "step", "version": version, "loss": 1.0, "wall": 100.0 + version})
    first.close()
    second = TensorBoardObserver(tmp_path)
    second({"event": "run_started", "resumed": True, "recipe": {"name": "x"}, "wall": 200.0})
    for version in range(6, 10):
        second({"event": "step", "version": version, "loss": 2.0, "wall": 200.0 + version})
    second.close()
    points = scalars(tmp_path)["learner/loss"]
    assert points == [(v, 1.0) for v in range(1, 6)] + [(v, 2.0) for v in range(6, 10)]


# ---------------------------------------------------------------- people


def test_the_log_says_every_milestone_and_few_steps(make_events):
    lines, now = [], 0.0
    observer = LogObserver(lines.append, interval=5.0, clock=lambda: now)
    for event in make_events(versions=40):
        now = event["t"]
        observer(event)
    text = "\n".join(lines)
    assert "run quickstart started" in lines[0]
    assert "warm start 60/60" in text
    assert text.count("held-out reward") == 5
    assert "drift exactly 0" in text and "tok/s" in text
    assert "version 40/40" in text, "the last step is never left out"
    assert len([line for line in lines if " version " in line]) <= now / 5 + 6
    assert "run finished" in lines[-1]


def test_the_log_keeps_up_with_a_resumed_run(make_events):
    lines = []
    observer = LogObserver(lines.append, interval=0.0)
    for event in make_events(versions=12, killed_at=8):
        observer(event)
    assert sum("resumed" in line for line in lines) == 1


def test_the_live_view_shows_both_bars_and_the_facts(make_events):
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=140)
    observer = LiveObserver(console)
    for event in make_events(versions=20):
        if event["event"] != "run_finished":
            observer(event)
    observer.close()
    observer.close()
    shown = output.getvalue()
    for words in ("warm start", "training", "held-out", "exactly 0", "staleness", "swap", "tok/s"):
        assert words in shown


@pytest.mark.parametrize("event", [{"event": "unheard_of"}, {"event": "step"}, {"event": "swap"}])
def test_events_with_missing_fields_or_of_unknown_kinds_disturb_nobody(tmp_path, event):
    console = Console(file=io.StringIO(), force_terminal=True)
    group = ObserverGroup(
        JsonlObserver(tmp_path / "metrics.jsonl"),
        TensorBoardObserver(tmp_path / "tensorboard"),
        LogObserver(lambda line: None),
        LiveObserver(console),
    )
    with group:
        group(event)
    assert len(strict_lines(tmp_path / "metrics.jsonl")) == 1
