"""Arenas: memory that is acquired and registered once, whatever moves through it."""

from __future__ import annotations

import mmap

import numpy

from weightplane.errors import InvalidArgumentError


class Arena:
    """Private, page-aligned memory that is already touched; what a slot is made of without shm.

    Args:
        size: bytes.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise InvalidArgumentError(f"an arena has {size} bytes; use a positive number")
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        numpy.frombuffer(self._map, numpy.uint8)[:] = 0

    @property
    def bytes(self) -> memoryview:
        """The writable bytes."""
        return memoryview(self._map)

    @property
    def address(self) -> int:
        """Of the first byte, in this process."""
        return address_of(self.bytes)


def address_of(view: memoryview) -> int:
    """The address of the first byte of ``view`` in this process."""
    return numpy.frombuffer(view, numpy.uint8).ctypes.data if len(view) else 0


class RegisteredArenas:
    """The staging buffers that a reader has registered."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def add(self, arena: memoryview) -> tuple[int, int]:
        """Remember a buffer; returns its address and its length in bytes."""
        entry = (address_of(arena), len(arena))
        self._ranges.append(entry)
        return entry

    def require(self, destination: memoryview) -> int:
        """The address of ``destination``.

        Raises:
            InvalidArgumentError: it does not lie inside one registered buffer.
        """
        first, length = address_of(destination), len(destination)
        for start, size in self._ranges:
            if not length or start <= first <= first + length <= start + size:
                return first
        raise InvalidArgumentError(
            f"a read of {length} bytes goes to memory that is not registered: "
            "call register() with the whole staging buffer first"
        )
