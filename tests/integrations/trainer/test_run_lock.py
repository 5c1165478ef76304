from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from integrations.errors import RunLockError
from integrations.trainer.run_lock import LOCK_FILE, run_lock

HOLDER = """
import sys, time
from pathlib import Path
from integrations.trainer.run_lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_process_is_refused_with_the_holders_number(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    try:
        with pytest.raises(RunLockError) as caught, run_lock(tmp_path):
            pass
        line = str(caught.value)
        assert str(tmp_path) in line and f"in use by process {holder.pid};" in line
        assert "\n" not in line
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    # The kernel drops the lock of a killed process: nothing stale stays behind.
    with run_lock(tmp_path):
        assert (tmp_path / LOCK_FILE).read_text() == f"{os.getpid()}\n"


def test_the_lock_is_released_when_the_block_ends_or_raises(tmp_path: Path) -> None:
    with pytest.raises(KeyError), run_lock(tmp_path / "new" / "run"):
        raise KeyError
    with run_lock(tmp_path / "new" / "run"):
        pass


def test_a_child_process_does_not_inherit_the_lock(tmp_path: Path) -> None:
    with run_lock(tmp_path):
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        with run_lock(tmp_path):
            pass
    finally:
        child.kill()
        child.wait()


def test_a_run_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunLockError, match="file cannot be used"), run_lock(tmp_path / "file"):
        pass
