"""Every example and command of the guide to Megatron-Core runs as it stands there."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

REPOSITORY = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(
    r"^```(python|bash)\n(.*?)^```",
    (REPOSITORY / "docs" / "megatron.md").read_text(),
    re.MULTILINE | re.DOTALL,
)


@pytest.mark.parametrize("language, code", BLOCKS)
def test_an_example_of_the_guide_runs(language, code, checkpoint, tmp_path):
    shutil.copytree(checkpoint("moe"), tmp_path / "models" / "mine")
    commands = [[sys.executable, "-W", "ignore", "-c", code]]
    if language == "bash":
        lines = [shlex.split(line) for line in code.replace("\\\n", " ").splitlines()]
        commands = [[sys.executable, "-m", "integrations.cli", *words[1:]] for words in lines]
        assert all(words[0] == "lockstep" for words in lines)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    for command in commands:
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=280, env=environment
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
