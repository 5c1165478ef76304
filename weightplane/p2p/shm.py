"""Shared memory between processes of one machine.

A slot is an anonymous file in ``/dev/shm`` (``O_TMPFILE``): it never has a name, reaches other
processes as a descriptor over the channel, and is gone when the last process that maps it is gone.
So nothing leaks when processes are killed, and nobody can open it by guessing a name. The space is
allocated, not only reserved, at construction: a full ``/dev/shm`` is one clear error then, instead
of a SIGBUS in the middle of a copy.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy

from weightplane.channel import MAX_DESCRIPTORS
from weightplane.errors import (
    ChannelError,
    InvalidArgumentError,
    ShmSpaceError,
    TransferError,
)
from weightplane.p2p import Offer, check_range

NAME = "shm"

DEFAULT_DIRECTORY = Path("/dev/shm")

_NO_TMPFILE = frozenset(
    {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT, errno.ENOTDIR, errno.EACCES}
)
"""What ``open(O_TMPFILE)`` answers where it, or the directory, does not exist or is not ours."""


def create_anonymous_file(size: int, directory: Path = DEFAULT_DIRECTORY) -> int:
    """A descriptor of ``size`` bytes of shared memory that has no name and is fully allocated.

    Falls back to ``memfd_create``, which has no name either, where ``directory`` does not exist or
    its file system lacks ``O_TMPFILE``.

    Raises:
        ShmSpaceError: there is too little room; nothing was left behind.
    """
    try:
        descriptor = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
        descriptor = os.memfd_create("lockstep-weights", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise space_error(size, directory) from error
        raise
    return descriptor


def space_error(size: int, directory: Path) -> ShmSpaceError:
    """The error for ``size`` bytes that do not fit in ``directory``; says what would."""
    free = free_bytes(directory)
    available = "memory ran out" if free is None else f"{free} bytes are free"
    return ShmSpaceError(
        f"{size} bytes of shared memory are needed in {directory}, {available}. Give it more room "
        "(docker run --shm-size, a larger emptyDir of medium Memory in Kubernetes, or "
        f"mount -o remount,size=... {directory}), or use fewer slots"
    )


def free_bytes(directory: Path) -> int | None:
    """Bytes free in the file system of ``directory``; None if unlimited or not there."""
    try:
        facts = os.statvfs(directory)
    except OSError:
        return None
    # A tmpfs without a limit reports zero blocks in total.
    return facts.f_bavail * facts.f_frsize if facts.f_blocks else None


class ShmTransport:
    """The publisher's half: one anonymous file per slot, mapped and touched at construction.

    Args:
        slot_bytes: bytes of each slot.
        slots: number of slots.
        directory: a tmpfs.

    Raises:
        ShmSpaceError: the slots do not fit; nothing was left behind.
    """

    def __init__(
        self, slot_bytes: int, slots: int = 2, directory: Path = DEFAULT_DIRECTORY
    ) -> None:
        if not 1 <= slots <= MAX_DESCRIPTORS:
            raise InvalidArgumentError(f"slots is {slots}; use 1 to {MAX_DESCRIPTORS}")
        if slot_bytes < 1:
            raise InvalidArgumentError(f"slot_bytes is {slot_bytes}; a layout with no bytes?")
        free = free_bytes(directory)
        if free is not None and free < slots * slot_bytes:
            # Asked first because filling a tmpfs to the brim, only to give it back, can starve
            # whoever else uses it meanwhile.
            raise space_error(slots * slot_bytes, directory)
        self._maps: list[mmap.mmap] = []
        descriptors: list[int] = []
        try:
            for _ in range(slots):
                descriptors.append(create_anonymous_file(slot_bytes, directory))
                # MAP_POPULATE: the first version would otherwise pay a page fault every 4 KiB.
                flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
                self._maps.append(mmap.mmap(descriptors[-1], slot_bytes, flags=flags))
        except BaseException:
            _close_descriptors(descriptors)
            _unmap(self._maps)
            raise
        place = _Place(os.getpid(), tuple(_identity(descriptor) for descriptor in descriptors))
        self._offer = Offer(
            NAME, slots, slot_bytes, tuple(descriptors), msgspec.msgpack.encode(place)
        )
        self._closed = False

    @property
    def offer(self) -> Offer:
        """How to reach the slots; its descriptors stay this transport's."""
        return self._offer

    def buffer(self, slot: int) -> memoryview:
        """The writable bytes of a slot."""
        return memoryview(self._maps[slot])

    def seal(self, slot: int) -> None:
        """Nothing to do: readers map the same pages."""

    def close(self) -> None:
        """Unmap the slots; the memory goes when the last reader has gone too."""
        if not self._closed:
            self._closed = True
            _close_descriptors(self._offer.descriptors)
            _unmap(self._maps)


class ShmReader:
    """The subscriber's half: the publisher's slots, mapped for reading only.

    Args:
        offer: the publisher's; its descriptors are closed by this call, whatever comes of it.

    Raises:
        ChannelError: the descriptors are not what the offer says.
    """

    def __init__(self, offer: Offer) -> None:
        self._offer = offer
        self._maps: list[mmap.mmap] = []
        if not offer.descriptors and offer.endpoint:
            offer = _reopen(offer)
        try:
            _check_descriptors(offer)
            for descriptor in offer.descriptors:
                self._maps.append(
                    mmap.mmap(descriptor, offer.slot_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
                )
        except BaseException:
            _unmap(self._maps)
            raise
        finally:
            _close_descriptors(offer.descriptors)
        self._slots = [numpy.frombuffer(mapping, numpy.uint8) for mapping in self._maps]
        for slot in self._slots:
            # Reading one byte per page maps it. MAP_POPULATE would do the same while holding the
            # interpreter lock, which stops the owner's token generation.
            numpy.bitwise_or.reduce(slot[:: mmap.PAGESIZE])

    def register(self, arena: memoryview) -> None:
        """Nothing to do: any memory can be copied to."""

    def read(self, slot: int, offset: int, destination: memoryview) -> None:
        """Fill ``destination`` with the bytes of ``slot`` from ``offset`` on."""
        check_range(self._offer, slot, offset, len(destination))
        target = numpy.frombuffer(destination, numpy.uint8)
        # numpy copies without the interpreter lock.
        numpy.copyto(target, self._slots[slot][offset : offset + len(target)])

    def close(self) -> None:
        """Unmap the slots."""
        self._slots = []
        _unmap(self._maps)


class _Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An open file: its descriptor in the owner, its device and its inode."""

    descriptor: int
    device: int
    inode: int


class _Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a reader finds the slots that no descriptor was passed for: the owner's open files."""

    process: int
    files: tuple[_Identity, ...]


def _identity(descriptor: int) -> _Identity:
    facts = os.fstat(descriptor)
    return _Identity(descriptor, facts.st_dev, facts.st_ino)


def _reopen(offer: Offer) -> Offer:
    """Open the owner's files through ``/proc``, for a control channel that carries no descriptors.

    The kernel allows it to processes of the same user on the same machine, and device and inode
    make sure that it is the very file: a process number can be used again.

    Raises:
        TransferError: the owner is gone, on another machine, or another user's.
    """
    try:
        place = msgspec.msgpack.decode(offer.endpoint, type=_Place)
    except msgspec.DecodeError as error:
        raise ChannelError(f"the endpoint of a shared-memory offer is malformed: {error}") from None
    opened: list[int] = []
    try:
        for file in place.files:
            path = f"/proc/{place.process}/fd/{file.descriptor}"
            opened.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            facts = os.fstat(opened[-1])
            if (facts.st_dev, facts.st_ino) != (file.device, file.inode):
                raise TransferError(
                    f"process {place.process} no longer holds the shared memory it offered"
                )
    except BaseException as error:
        _close_descriptors(opened)
        if isinstance(error, OSError):
            raise TransferError(
                f"the shared memory of process {place.process} cannot be opened "
                f"({error.strerror}): shm needs both processes on one machine, under one user and "
                "in one process namespace; use another transport between machines"
            ) from error
        raise
    return replace(offer, descriptors=tuple(opened))


def _check_descriptors(offer: Offer) -> None:
    if len(offer.descriptors) != offer.slots:
        raise ChannelError(
            f"the publisher offers {offer.slots} slots and {len(offer.descriptors)} descriptors"
        )
    for descriptor in offer.descriptors:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size < offer.slot_bytes:
            # Reading past the end of a mapped file kills the process with SIGBUS.
            raise ChannelError(
                f"the publisher offers slots of {offer.slot_bytes} bytes, "
                f"but a descriptor has {facts.st_size}"
            )


def _close_descriptors(descriptors: tuple[int, ...] | list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _unmap(maps: list[mmap.mmap]) -> None:
    while maps:
        mapping = maps.pop()
        try:
            mapping.close()
        except BufferError:
            # Somebody still holds a view; the mapping goes with the last of them.
            continue
