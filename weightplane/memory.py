"""Private buffers that versions are staged in, and the rule for when one may be overwritten.

The engine computes with views of these buffers, and may keep some for as long as it likes: for
requests that finish on the old weights, or in parameters derived from them. Overwriting a buffer
under such a view would serve a mix of two versions, so a buffer is reusable only when nothing
refers to it. Every tensor over a buffer keeps one *lease* alive, a small object that dies with the
last of them, in whatever thread and however the view was derived. No tensor has to be handed back.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
import weakref
from collections.abc import Callable

import numpy
import torch

from weightplane.errors import (
    ClosedError,
    InvalidArgumentError,
    StagingMemoryError,
    StalledError,
)

_POLL_SECONDS = 0.01
"""How often to look whether the owner let go of a buffer. A buffer is let go by reference counting,
in any thread at any moment, where taking a lock to notify somebody could deadlock."""


class StagingBuffer:
    """One flat private buffer, page-aligned and already touched."""

    def __init__(self, size: int) -> None:
        try:
            self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise StagingMemoryError(
                f"no memory for a staging buffer of {size} bytes ({error.strerror}): "
                "use a smaller retain or stage_ahead, or give the process more memory"
            ) from error
        # Huge pages cost a third as much to touch first, and whoever reads the weights misses the
        # TLB less. A kernel without them refuses the advice, and ordinary pages do.
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        # Touch every page now, without the interpreter lock, so that staging does not have to.
        numpy.copyto(numpy.frombuffer(self._map, numpy.uint8), 0)
        self.taken = False
        self._lease: weakref.ref[memoryview] | None = None

    @property
    def bytes(self) -> memoryview:
        """The writable bytes; for the thread that stages, while no lease is alive."""
        return memoryview(self._map)

    @property
    def leased(self) -> bool:
        """Whether any tensor over this buffer is still alive somewhere."""
        return self._lease is not None and self._lease() is not None

    def give_back(self) -> None:
        """Its version is over; it is reused once its lease is. From any thread."""
        self.taken = False

    def lease(self) -> torch.Tensor:
        """A uint8 tensor [size] over the buffer; the buffer is leased until its storage dies."""
        holder = memoryview(self._map)
        # torch keeps the object it was given alive exactly as long as the storage.
        flat = torch.frombuffer(holder, dtype=torch.uint8)
        self._lease = weakref.ref(holder)
        return flat


class BufferPool:
    """At most ``limit`` staging buffers of one size.

    `take` and `warm` belong to one thread, the one that stages: making a buffer takes a third of a
    second per gigabyte, and nobody should wait for it. `give_back` may be called from any thread.

    Args:
        size: bytes of each buffer.
        limit: most buffers that may exist at a time.
    """

    def __init__(self, size: int, limit: int) -> None:
        if size < 1 or limit < 1:
            raise InvalidArgumentError(f"a pool of {limit} buffers of {size} bytes holds nothing")
        self._size = size
        self._limit = limit
        self._buffers: list[StagingBuffer] = []

    def __len__(self) -> int:
        return len(self._buffers)

    @property
    def buffers(self) -> tuple[StagingBuffer, ...]:
        """Every buffer, in the order in which they were made."""
        return tuple(self._buffers)

    def take(self) -> StagingBuffer | None:
        """A buffer that nothing refers to; None if there is none and none may be added."""
        for buffer in self._buffers:
            if not buffer.taken and not buffer.leased:
                buffer.taken = True
                return buffer
        if len(self._buffers) >= self._limit:
            return None
        buffer = StagingBuffer(self._size)
        buffer.taken = True
        self._buffers.append(buffer)
        return buffer

    def obtain(
        self,
        number: int,
        make_room: Callable[[], None],
        stop: threading.Event,
        wait_seconds: float,
    ) -> StagingBuffer:
        """A buffer that nothing refers to; waits for the owner to let go of one.

        Args:
            number: of the weight version that wants it, for errors.
            make_room: called before every try.
            stop: ends the wait.
            wait_seconds: how long to wait.

        Raises:
            StalledError: the owner still holds tensors of all.
            ClosedError: ``stop`` was set.
        """
        deadline = time.monotonic() + wait_seconds
        while True:
            make_room()
            buffer = self.take()
            if buffer is not None:
                return buffer
            if time.monotonic() > deadline:
                raise StalledError(
                    f"no staging buffer became free for weight version {number} in "
                    f"{wait_seconds:g} seconds: the engine still holds tensors of all "
                    f"{len(self)}. Let go of the tensors of retired versions"
                )
            if stop.wait(_POLL_SECONDS):
                raise ClosedError("the subscriber was closed")

    def take_in_place(self) -> StagingBuffer:
        """The first buffer, whoever still computes with it: for an owner that has paused."""
        self.warm(1)
        buffer = self._buffers[0]
        buffer.taken = True
        return buffer

    def warm(self, count: int) -> None:
        """Make one more buffer if fewer than ``count`` exist, so that a later `take` is free."""
        if len(self._buffers) < min(count, self._limit):
            self._buffers.append(StagingBuffer(self._size))

    def give_back(self, buffer: StagingBuffer) -> None:
        """The pool's owner no longer needs ``buffer``; it is reused once its lease is over."""
        buffer.give_back()
