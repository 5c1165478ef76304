"""A version that an engine computes with where its publisher wrote it.

Nothing is copied: the engine's tensors are views of the publisher's slot, mapped copy-on-write. A
lock keeps the publisher from the slot for as long as any tensor over it is alive in this process,
in whatever thread and however it was derived; it ends with the process, too. Where the publisher
needs the slot sooner, the reader makes the pages its own, in place, under the running engine.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref

import numpy
import torch


class SharedVersion:
    """The bytes of one slot, kept as they are by a lock.

    Args:
        slot: the publisher's slot.
        mapping: the slot's file, mapped copy-on-write.
        size: bytes of the slot.
        lock: a descriptor whose closing ends the lock; owned from now on.
    """

    def __init__(self, slot: int, mapping: mmap.mmap, size: int, lock: int) -> None:
        self.slot = slot
        self._maps = [mapping]
        self._size = size
        self._locks = [lock]

    @property
    def bytes(self) -> memoryview:
        """The bytes, for reading; until the last tensor is gone."""
        return memoryview(self._maps[0])[: self._size]

    @property
    def kept(self) -> bool:
        """Whether the publisher is kept from the slot."""
        return bool(self._locks)

    def lease(self) -> torch.Tensor:
        """A uint8 tensor [size] over the slot; the lock ends with its storage."""
        holder = self.bytes
        # torch keeps the object it was given alive exactly as long as the storage.
        flat = torch.frombuffer(holder, dtype=torch.uint8)
        weakref.finalize(holder, self.release).atexit = False
        return flat

    def give_back(self) -> None:
        """The version retired. The lock ends by itself, with the last tensor."""

    def release(self) -> None:
        """Nothing refers to the bytes: let go of them. From any thread, also while collecting
        garbage: taking the only element of a list is atomic and needs no lock that could deadlock.
        """
        self._unlock()
        self._maps.clear()

    def make_private(self) -> None:
        """Copy every page, under whoever computes with them, and end the lock.

        Writing the byte that a page begins with makes the kernel copy the page; addresses and
        values stay.
        """
        pages = numpy.frombuffer(self.bytes, numpy.uint8)[:: mmap.PAGESIZE]
        numpy.bitwise_or(pages, 0, out=pages)
        self._unlock()

    def _unlock(self) -> None:
        try:
            descriptor = self._locks.pop()
        except IndexError:
            return
        os.close(descriptor)


class SharedVersions:
    """The versions of one subscriber that keep a publisher from its slots. Thread-safe."""

    def __init__(self) -> None:
        self._kept: list[SharedVersion] = []
        self._changed = threading.Lock()

    def add(self, version: SharedVersion) -> None:
        """Remember a version until its lock ends."""
        with self._changed:
            self._kept = [item for item in self._kept if item.kept] + [version]

    def in_slot(self, slot: int) -> tuple[SharedVersion, ...]:
        """Those that lie in ``slot`` of any publisher."""
        with self._changed:
            return tuple(item for item in self._kept if item.slot == slot and item.kept)
