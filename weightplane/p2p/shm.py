"""Shared memory between processes of one machine.

A slot is an anonymous file (see `shm_files`) with one more page behind the version, the *stamp*:
which claim of the slot wrote, or writes, what lies there, and how far. Readers either copy a slot,
as over any transport, or compute with it where it lies:

- every reader maps a slot copy-on-write, so whatever an engine writes into its weights stays its
  own and can reach neither the publisher nor another engine;
- a reader that keeps a slot holds a shared lock (``flock``) on it, and the owner takes the
  exclusive one to write: the kernel keeps the two apart, and lets go for whoever is killed;
- the stamp, read under the lock, says whether the slot still holds what was announced.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
from pathlib import Path

import msgspec
import numpy

from weightplane.channel import MAX_DESCRIPTORS
from weightplane.errors import InvalidArgumentError
from weightplane.p2p import Offer, check_range
from weightplane.p2p.shm_files import (
    DEFAULT_DIRECTORY,
    Place,
    check_descriptors,
    close_descriptors,
    create_anonymous_file,
    free_bytes,
    identity,
    reopen,
    space_error,
)
from weightplane.sharing import SharedVersion

NAME = "shm"

_STAMP = struct.Struct("<QQ")
"""The claim that a slot's bytes belong to, and how many of them are written."""


def stamp_offset(slot_bytes: int) -> int:
    """Where the stamp lies in a slot's file: at the first page behind the slot."""
    return -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def file_bytes(slot_bytes: int) -> int:
    """Bytes of the file of one slot."""
    return stamp_offset(slot_bytes) + _STAMP.size


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
        self._slot_bytes = slot_bytes
        self._directory = directory
        self._maps: list[mmap.mmap] = []
        self._descriptors: list[int] = []
        self._claims = 0
        try:
            for _ in range(slots):
                descriptor, mapping = self._make_slot()
                self._descriptors.append(descriptor)
                self._maps.append(mapping)
        except BaseException:
            self._release()
            raise
        self._closed = False

    @property
    def offer(self) -> Offer:
        """How to reach the slots; its descriptors stay this transport's."""
        files = tuple(identity(descriptor) for descriptor in self._descriptors)
        return Offer(
            NAME,
            len(self._maps),
            self._slot_bytes,
            tuple(self._descriptors),
            msgspec.msgpack.encode(Place(os.getpid(), files)),
        )

    def buffer(self, slot: int) -> memoryview:
        """The writable bytes of a slot."""
        return memoryview(self._maps[slot])[: self._slot_bytes]

    def claim(self, slot: int) -> int | None:
        """Take a slot for writing; None while a reader keeps what lies in it.

        Returns:
            The number of the claim, from 1 on, which the slot is stamped with.
        """
        try:
            fcntl.flock(self._descriptors[slot], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        self._claims += 1
        self._stamp(slot, self._claims, 0)
        return self._claims

    def advance(self, slot: int, written: int) -> None:
        """Show readers that the first ``written`` bytes of a claimed slot are final."""
        self._stamp(slot, _STAMP.unpack_from(self._maps[slot], self._stamp_offset)[0], written)

    def seal(self, slot: int) -> None:
        """The slot is written; readers may keep it from now on."""
        self.advance(slot, self._slot_bytes)
        fcntl.flock(self._descriptors[slot], fcntl.LOCK_UN)

    def disclaim(self, slot: int) -> None:
        """Give up a claim: the slot holds nothing."""
        self._stamp(slot, 0, 0)
        fcntl.flock(self._descriptors[slot], fcntl.LOCK_UN)

    def replace(self, slot: int) -> Offer:
        """Put fresh memory in the place of a slot that a reader keeps; the old is that reader's.

        Returns:
            An offer of this one slot; its descriptor stays this transport's.

        Raises:
            ShmSpaceError: there is no room for another slot.
        """
        descriptor, mapping = self._make_slot()
        old_descriptor, old_mapping = self._descriptors[slot], self._maps[slot]
        self._descriptors[slot], self._maps[slot] = descriptor, mapping
        close_descriptors([old_descriptor])
        unmap([old_mapping])
        place = Place(os.getpid(), (identity(descriptor),))
        return Offer(NAME, 1, self._slot_bytes, (descriptor,), msgspec.msgpack.encode(place))

    def close(self) -> None:
        """Unmap the slots; the memory goes when the last reader has gone too."""
        if not self._closed:
            self._closed = True
            self._release()

    @property
    def _stamp_offset(self) -> int:
        return stamp_offset(self._slot_bytes)

    def _stamp(self, slot: int, claim: int, written: int) -> None:
        _STAMP.pack_into(self._maps[slot], self._stamp_offset, claim, written)

    def _make_slot(self) -> tuple[int, mmap.mmap]:
        size = file_bytes(self._slot_bytes)
        descriptor = create_anonymous_file(size, self._directory)
        try:
            # MAP_POPULATE: the first version would otherwise pay a page fault every 4 KiB.
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            return descriptor, mmap.mmap(descriptor, size, flags=flags)
        except BaseException:
            os.close(descriptor)
            raise

    def _release(self) -> None:
        close_descriptors(self._descriptors)
        self._descriptors = []
        unmap(self._maps)


class ShmReader:
    """The subscriber's half: the publisher's slots, mapped copy-on-write.

    Args:
        offer: the publisher's; its descriptors are closed by this call, whatever comes of it.

    Raises:
        ChannelError: the descriptors are not what the offer says.
        TransferError: the publisher's files cannot be opened from here.
    """

    def __init__(self, offer: Offer) -> None:
        self._offer = offer
        self._files: list[int] = []
        self._maps: list[mmap.mmap] = []
        opened = _open(offer)
        try:
            for descriptor in opened:
                self._files.append(_own_file(descriptor))
                self._maps.append(_map(self._files[-1], offer.slot_bytes))
        except BaseException:
            close_descriptors(self._files)
            unmap(self._maps)
            raise
        finally:
            close_descriptors(opened)

    def register(self, arena: memoryview) -> None:
        """Nothing to do: any memory can be copied to."""

    def read(self, slot: int, offset: int, destination: memoryview) -> None:
        """Fill ``destination`` with the bytes of ``slot`` from ``offset`` on."""
        check_range(self._offer, slot, offset, len(destination))
        target = numpy.frombuffer(destination, numpy.uint8)
        source = numpy.frombuffer(self._maps[slot], numpy.uint8)
        # numpy copies without the interpreter lock.
        numpy.copyto(target, source[offset : offset + len(target)])

    def view(self, slot: int) -> memoryview:
        """The bytes of a slot where they lie; torn while they are written."""
        return memoryview(self._maps[slot])[: self._offer.slot_bytes]

    def written(self, slot: int, claim: int) -> int:
        """How many bytes of a slot are final for that claim; 0 if another claim has the slot."""
        stamped, count = _STAMP.unpack_from(self._maps[slot], stamp_offset(self._offer.slot_bytes))
        # Claims are numbered from 1 on: a slot that was written without one cannot be kept.
        return min(count, self._offer.slot_bytes) if 0 < stamped == claim else 0

    def share(self, slot: int, claim: int) -> SharedVersion | None:
        """Keep a slot as it is, until nothing refers to it; None if it holds another claim's bytes
        or the owner writes it.
        """
        # A file description of its own: its lock ends when it is closed, and with the process.
        lock = _reopen_descriptor(self._files[slot])
        if lock is None:
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            kept = self.written(slot, claim) == self._offer.slot_bytes
        except BlockingIOError:
            kept = False
        if not kept:
            os.close(lock)
            return None
        return SharedVersion(slot, self._maps[slot], self._offer.slot_bytes, lock)

    def renew(self, slot: int) -> None:
        """Map a slot again: its mapping is somebody's own copy by now, or was written into."""
        fresh = _map(self._files[slot], self._offer.slot_bytes)
        stale, self._maps[slot] = self._maps[slot], fresh
        unmap([stale])

    def replace(self, slot: int, offer: Offer) -> None:
        """The owner has put fresh memory in the place of a slot.

        Args:
            slot: which one.
            offer: of this one slot; its descriptor is closed by this call.
        """
        (opened,) = _open(offer)
        try:
            own = _own_file(opened)
        finally:
            os.close(opened)
        stale, self._files[slot] = self._files[slot], own
        os.close(stale)
        self.renew(slot)

    def close(self) -> None:
        """Let go of the slots; what is shared stays as long as somebody refers to it."""
        close_descriptors(self._files)
        self._files = []
        unmap(self._maps)


def _open(offer: Offer) -> tuple[int, ...]:
    """The checked descriptors of an offer, which the caller closes."""
    if not offer.descriptors and offer.endpoint:
        offer = reopen(offer)
    try:
        check_descriptors(offer, file_bytes(offer.slot_bytes))
    except BaseException:
        close_descriptors(offer.descriptors)
        raise
    return offer.descriptors


def _reopen_descriptor(descriptor: int) -> int | None:
    """Another file description of the same file; None where this user may not open it."""
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _own_file(descriptor: int) -> int:
    own = _reopen_descriptor(descriptor)
    return os.dup(descriptor) if own is None else own


def _map(descriptor: int, slot_bytes: int) -> mmap.mmap:
    mapping = mmap.mmap(
        descriptor,
        file_bytes(slot_bytes),
        mmap.MAP_PRIVATE,
        mmap.PROT_READ | mmap.PROT_WRITE,
    )
    # Reading one byte per page maps it. MAP_POPULATE would do the same while holding the
    # interpreter lock, which stops the owner's token generation, and would copy every page.
    numpy.bitwise_or.reduce(numpy.frombuffer(mapping, numpy.uint8)[:: mmap.PAGESIZE])
    return mapping


def unmap(maps: list[mmap.mmap]) -> None:
    """Close mappings; one that somebody still views goes with the last of the views."""
    while maps:
        with contextlib.suppress(BufferError):
            maps.pop().close()
