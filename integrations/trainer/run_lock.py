"""`run_lock`: one process at a time works on a run directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from integrations.errors import RunLockError

__all__ = ["LOCK_FILE", "run_lock"]

LOCK_FILE = "run.lock"


@contextlib.contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold the lock of ``run_dir`` while the block runs; the kernel drops it when a process dies.

    Raises:
        RunLockError: another process holds it (named), or the folder cannot be written.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise RunLockError(f"run_dir {run_dir} cannot be used: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            raise RunLockError(
                f"run_dir {run_dir} is in use by process {holder}; "
                "stop it or choose another run_dir"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
