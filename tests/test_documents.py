"""Every example and every command in README, CONTRIBUTING and docs/ is run as it stands there."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *(REPOSITORY / "docs").glob("*.md")]
)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
STEPS = re.compile(r"^(learner\.steps=)(\d+)$")
# A training command is run with a tenth of the steps, and smaller ones; all else as it is written.
SMALL = [
    "learner.groups_per_step=2",
    "learner.samples_per_group=2",
    "warm_start.steps=2",
    "evaluation.prompts=4",
    "task.held_out=4",
]


def blocks(language: str) -> list:
    found = []
    for page in PAGES:
        for place, match in enumerate(BLOCK.finditer(page.read_text())):
            if match[1] == language:
                found.append(pytest.param(match[2], id=f"{page.stem}-{place}"))
    return found


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=280, env=environment
    )


@pytest.mark.parametrize("code", blocks("python"))
def test_a_python_example_runs(code, tmp_path):
    done = run([sys.executable, "-c", code], tmp_path)
    assert done.returncode == 0, done.stderr


def make_targets() -> set[str]:
    text = (REPOSITORY / "Makefile").read_text()
    return set(re.findall(r"^([a-z][\w-]*):", text, re.MULTILINE))


def command_lines(block: str) -> list[list[str]]:
    joined = block.replace("\\\n", " ")
    return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]


@pytest.mark.parametrize("block", blocks("bash"))
def test_a_make_command_names_a_target(block):
    for words in command_lines(block):
        if words[0] == "make":
            assert set(words[1:]) <= make_targets(), words


@pytest.mark.runs
@pytest.mark.parametrize("block", blocks("bash"))
def test_a_block_of_commands_runs(block, tmp_path):
    """In the order of the block, in one folder that holds the recipes."""
    shutil.copytree(REPOSITORY / "recipes", tmp_path / "recipes")
    for words in command_lines(block):
        if words[0] == "make":
            continue  # the suite itself runs under make; its targets are checked by name
        if words[:2] == ["lockstep", "train"]:
            words = [
                *(
                    STEPS.sub(lambda match: f"{match[1]}{max(1, int(match[2]) // 10)}", word)
                    for word in words
                ),
                *SMALL,
            ]
        if words[0] == "lockstep":
            words = [sys.executable, "-m", "integrations.cli", *words[1:]]
        elif words[0] == "python":
            words = [sys.executable, *words[1:]]
        else:
            pytest.fail(f"a command that this test does not know how to run: {shlex.join(words)}")
        done = run(words, tmp_path)
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
