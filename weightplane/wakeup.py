"""A flag that `select` can wait for."""

from __future__ import annotations

import contextlib
import os
import threading


class Wakeup:
    """Readable for `select` from `set` until `clear`; all methods may be called from any thread.

    Closing is safe against a concurrent `set`: a plain eventfd would let it write into whatever
    file the process opened next under the same number.
    """

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """The descriptor to wait on; -1 after `close`."""
        return self._descriptor

    def set(self) -> None:
        """Make it readable; does nothing after `close`."""
        with self._lock:
            if self._descriptor >= 0:
                os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        """Make it not readable."""
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._descriptor >= 0:
                os.eventfd_read(self._descriptor)

    def close(self) -> None:
        """Release the descriptor; idempotent."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
