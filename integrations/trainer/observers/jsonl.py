"""Events as lines of JSON: the record from which every report is drawn."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from integrations.trainer.observers.observer import Event

__all__ = ["JsonlObserver", "plain"]


class JsonlObserver:
    """Appends each event to a file as one line of valid JSON, with one ``os.write``.

    A reader therefore never sees half an event of a living run. A process that died in the middle
    of a write may have left half a line; the next run ends that line before it adds its own.
    NaN and infinity, which JSON does not have, become null.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._descriptor: int | None = None

    def __call__(self, event: Event) -> None:
        """Raises OSError, naming the file, when the line cannot be written (a full disk)."""
        line = json.dumps(plain(event), ensure_ascii=False, allow_nan=False) + "\n"
        data = line.encode("utf-8", errors="backslashreplace")
        if self._descriptor is None:
            self._descriptor = self._open()
        try:
            while data:  # the kernel may take a line in parts when a disk is nearly full
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        """Closes the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(
            self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644
        )  # fmt: skip
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            os.write(descriptor, b"\n")
        return descriptor


def plain(value: Any) -> Any:
    """`value` in the types that JSON has; numbers of numpy or torch become Python's."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if not isinstance(value, float) and hasattr(value, "item"):
        return plain(value.item())
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return str(value)
