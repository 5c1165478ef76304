"""`lockstep bench`: starts a measurement as a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from integrations.cli_errors import InputError


def run_bench(what: str, arguments: Sequence[str]) -> int:
    """Run ``python -m bench.WHAT`` with ``arguments``; returns its exit code.

    Raises:
        InputError: there is no such measurement.
    """
    if not what.isidentifier() or find_spec(f"bench.{what}") is None:
        raise InputError(f"there is no bench {what!r}; for example: lockstep bench sync")
    command = [sys.executable, "-m", f"bench.{what}", *arguments]
    return subprocess.run(command, check=False).returncode
