"""Whole training runs in separate processes: the job itself, kill -9, and resume."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL = [
    "learner.steps=6",
    "learner.groups_per_step=4",
    "learner.samples_per_group=4",
    "warm_start.steps=4",
    "evaluation.prompts=8",
    "task.held_out=8",
    "checkpoint.every=2",
    "drift.trajectories=16",
]

pytestmark = pytest.mark.runs


def command(run_dir: Path, *more: str) -> list[str]:
    words = [sys.executable, "-m", "integrations.cli", "train", "recipes/quickstart.yaml"]
    return [*words, *SMALL, "--run-dir", str(run_dir), *more]


def events(run_dir: Path, kind: str) -> list[dict]:
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    found = []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if event["event"] == kind:
            found.append(event)
    return found


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        if any(event["step"] >= step for event in events(run_dir, "step")):
            return
        if process.poll() is not None:
            pytest.fail(f"the run ended early: {process.communicate()[1]}")
        time.sleep(0.1)
    pytest.fail("the run made no progress")


def children(pid: int) -> dict[str, int]:
    """Worker processes of a controller by role."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, IndexError, ValueError):
            continue
        if parent == pid and b"integrations.trainer.worker" in words:
            role = words[words.index(b"integrations.trainer.worker") + 1].decode()
            found[role] = int(entry.name)
    return found


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return True
    return state == "Z"


def check_whole(run_dir: Path, summary: dict) -> None:
    assert summary["lost"] == 0
    assert summary["k3_kl"] == 0.0
    assert summary["max_abs_diff"] == 0.0
    assert summary["router_flip_rate"] == 0.0
    assert {event["step"] for event in events(run_dir, "step")} == set(range(1, 7))
    assert (run_dir / "report.html").exists()
    assert (run_dir / "final" / "model.safetensors").exists()
    assert not [path for path in Path("/dev/shm").iterdir() if "lockstep" in path.name]


def test_a_run_trains_with_no_drift_and_real_staleness(tmp_path):
    summary_file = tmp_path / "summary.json"
    done = subprocess.run(
        command(tmp_path / "run", "--json", str(summary_file)),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(summary_file.read_text())
    check_whole(tmp_path / "run", summary)
    assert summary["audited_tokens"] > 0
    assert summary["trajectories"] == 6 * 16
    assert summary["max_staleness"] > 0
    assert summary["swaps"] >= 5


@pytest.mark.parametrize("victim", ["rollout", "learner", "controller"])
def test_after_a_kill_the_run_resumes_and_loses_nothing(tmp_path, victim):
    run_dir = tmp_path / "run"
    process = subprocess.Popen(
        command(run_dir), cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for_step(run_dir, 3, process)
    workers = children(process.pid)
    assert set(workers) == {"rollout", "learner"}
    os.kill(process.pid if victim == "controller" else workers[victim], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    if victim != "controller":
        assert "SIGKILL" in errors.strip().splitlines()[-1]
        assert "Traceback" not in errors
    deadline = time.monotonic() + 20
    while not all(gone(pid) for pid in workers.values()):
        assert time.monotonic() < deadline, "a worker outlived the run"
        time.sleep(0.1)
    summary_file = tmp_path / "summary.json"
    done = subprocess.run(
        command(run_dir, "--resume", "--json", str(summary_file)),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    check_whole(run_dir, json.loads(summary_file.read_text()))
    assert not events(run_dir, "replay_diverged")


def test_a_broken_recipe_gives_one_line(tmp_path):
    done = subprocess.run(
        command(tmp_path / "run", "learner.step=3"),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "learner.steps" in done.stderr
