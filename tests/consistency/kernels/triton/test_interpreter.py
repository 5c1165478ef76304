"""Runs each file of `interpreted/` in a process of its own, with Triton's interpreter on.

Whether a kernel is interpreted is decided when Triton is imported, so these tests cannot share a
process with tests that compile kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).with_name("interpreted")
ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("check_*.py")))
def test_the_kernels_keep_the_contract_in_the_interpreter(name):
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{FOLDER / name}.py"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
