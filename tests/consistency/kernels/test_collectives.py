"""Eight gloo processes are started once; their groups of 1, 2, 4 and 8 are compared with one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from consistency.errors import UnsupportedError
from consistency.kernels import collectives

PROGRAM = Path(__file__).with_name("collectives_process.py")
SIZES = (1, 2, 4, 8)
CHECKS = (
    "column_parallel",
    "row_parallel",
    "main_grad",
    "logits",
    "logprob",
    "transformer_block",
    "tree_sums",
    "sequence_seams",
    "run_to_run",
    "refusals",
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """{(group size, check): what each rank of the group reports}."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), str(folder)],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        errors = process.communicate(timeout=250)[1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors
    found = {}
    for rank in range(8):
        for line in (folder / f"{rank}").read_text().splitlines():
            size, name, outcome = line.split(" ", 2)
            found.setdefault((int(size), name), []).append(outcome)
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("check", CHECKS)
def test_every_rank_of_a_group_has_the_bits_of_one_process(outcomes, size, check):
    assert outcomes[size, check] == ["ok"] * size


def test_every_check_of_the_ranks_is_listed_here(outcomes):
    assert {name for _, name in outcomes} == set(CHECKS)


def test_without_a_process_group_the_fix_is_named():
    with pytest.raises(UnsupportedError, match="init_process_group"):
        collectives.tree_all_reduce(torch.zeros(2))
