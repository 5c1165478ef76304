"""`atomic_directory`: a directory that is either complete or not there.

Files are written into a hidden sibling, flushed to the disk, and the sibling is renamed to its
final name. A process killed at any moment leaves at most a hidden sibling, which
`remove_leftovers` takes away.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

__all__ = ["atomic_directory", "remove_directory", "remove_leftovers", "sync_directory"]

_PARTIAL = ".partial-"
_DELETED = ".deleted-"


@contextlib.contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Yield an empty directory that becomes ``target`` when the block ends without an exception.

    A ``target`` that exists already is replaced. Only one process at a time may work on a target.

    Args:
        target: final path; its parent is created.

    Raises:
        OSError: from the file system, for example when the disk is full; ``target`` is unchanged.
    """
    parent = target.parent
    parent.mkdir(parents=True, exist_ok=True)
    partial = parent / f"{_PARTIAL}{target.name}"
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    try:
        yield partial
        for path in sorted(partial.rglob("*")):
            _sync(path)
        _sync(partial)
        if target.exists():
            remove_directory(target)
        partial.rename(target)
        _sync(parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def remove_directory(target: Path) -> None:
    """Delete ``target`` so that no moment shows half of it: it is hidden first, then emptied."""
    hidden = target.parent / f"{_DELETED}{target.name}"
    if hidden.exists():
        shutil.rmtree(hidden)
    target.rename(hidden)
    _sync(target.parent)
    shutil.rmtree(hidden)


def remove_leftovers(parent: Path) -> list[Path]:
    """Delete what interrupted writes and deletions have left in ``parent``; returns the paths."""
    leftovers = [
        path
        for path in sorted(parent.iterdir())
        if path.name.startswith((_PARTIAL, _DELETED)) and path.is_dir()
    ]
    for path in leftovers:
        shutil.rmtree(path)
    return leftovers


def sync_directory(directory: Path) -> None:
    """Make the names in ``directory`` (created, renamed, deleted files) survive a power failure."""
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
