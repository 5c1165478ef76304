"""A run that cannot go on ends with one line, a non-zero exit code, and nothing left behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SHARED_MEMORY = Path("/dev/shm")
SMALL = [
    "learner.steps=2",
    "learner.groups_per_step=2",
    "learner.samples_per_group=2",
    "evaluation.prompts=4",
    "task.held_out=4",
]

pytestmark = pytest.mark.runs


def train(run_dir: Path, *more: str, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    words = [sys.executable, "-m", "integrations.cli", "train", "recipes/quickstart.yaml"]
    return subprocess.run(
        [*prefix, *words, *SMALL, "--quiet", "--run-dir", str(run_dir), *more],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=200,
    )


def ends_with_one_line(done: subprocess.CompletedProcess, *words: str) -> None:
    lines = done.stderr.strip().splitlines()
    assert done.returncode not in (0, -9), done.stderr
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("lockstep: ")
    for word in words:
        assert word in lines[0], lines[0]


@pytest.fixture(autouse=True)
def nothing_is_left_in_shared_memory():
    before = set(SHARED_MEMORY.iterdir())
    yield
    assert set(SHARED_MEMORY.iterdir()) <= before


def test_a_missing_model_folder(tmp_path):
    done = train(tmp_path / "run", "model={path: no/such/model}", "tokenizer={kind: bytes}")
    ends_with_one_line(done, "no/such/model")


def test_a_corrupt_safetensors_file(tmp_path):
    first = train(tmp_path / "good", "warm_start.steps=1")
    assert first.returncode == 0, first.stderr
    model = tmp_path / "model"
    shutil.copytree(tmp_path / "good" / "final", model)
    weights = next(model.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[:8] = b"\xff" * 8
    weights.write_bytes(bytes(content))
    done = train(tmp_path / "run", f"model={{path: {model}}}")
    ends_with_one_line(done, weights.name)
    weights.write_bytes(b"")
    ends_with_one_line(train(tmp_path / "again", f"model={{path: {model}}}"), weights.name)


def test_a_loss_that_is_not_a_number(tmp_path):
    done = train(tmp_path / "run", "warm_start.steps=4", "warm_start.learning_rate=1.0e+38")
    ends_with_one_line(done, "nan", "learner.learning_rate")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small /dev/shm needs root")
def test_a_full_shared_memory(tmp_path):
    mount = 'mount -t tmpfs -o size=512k tmpfs /dev/shm && exec "$@"'
    prefix = ("unshare", "--mount", "--propagation", "private", "sh", "-c", mount, "sh")
    done = train(tmp_path / "run", "warm_start.steps=1", prefix=prefix)
    ends_with_one_line(done, "/dev/shm")
