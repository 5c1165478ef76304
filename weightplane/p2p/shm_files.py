"""Anonymous files in shared memory: made by one process, opened by others, gone with the last.

A file has no name, reaches other processes as a descriptor over the channel or through ``/proc``,
and is gone when the last process that maps it is gone. So nothing leaks when processes are killed,
and nobody can open it by guessing a name. The space is allocated, not only reserved, when it is
made: a full ``/dev/shm`` is one clear error then, instead of a SIGBUS in the middle of a copy.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from weightplane.errors import ChannelError, ShmSpaceError, TransferError
from weightplane.p2p import Offer

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


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An open file: its descriptor in the owner, its device and its inode."""

    descriptor: int
    device: int
    inode: int


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a reader finds the slots that no descriptor was passed for: the owner's open files."""

    process: int
    files: tuple[Identity, ...]


def identity(descriptor: int) -> Identity:
    """What an open file is."""
    facts = os.fstat(descriptor)
    return Identity(descriptor, facts.st_dev, facts.st_ino)


def reopen(offer: Offer) -> Offer:
    """Open the owner's files through ``/proc``, for a control channel that carries no descriptors.

    The kernel allows it to processes of the same user on the same machine, and device and inode
    make sure that it is the very file: a process number can be used again.

    Raises:
        TransferError: the owner is gone, on another machine, or another user's.
    """
    try:
        place = msgspec.msgpack.decode(offer.endpoint, type=Place)
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
        close_descriptors(opened)
        if isinstance(error, OSError):
            raise TransferError(
                f"the shared memory of process {place.process} cannot be opened "
                f"({error.strerror}): shm needs both processes on one machine, under one user and "
                "in one process namespace; use another transport between machines"
            ) from error
        raise
    return replace(offer, descriptors=tuple(opened))


def check_descriptors(offer: Offer, size: int) -> None:
    """Raise `ChannelError` unless an offer has a file of ``size`` bytes or more for every slot."""
    if len(offer.descriptors) != offer.slots:
        raise ChannelError(
            f"the publisher offers {offer.slots} slots and {len(offer.descriptors)} descriptors"
        )
    for descriptor in offer.descriptors:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size < size:
            # Reading past the end of a mapped file kills the process with SIGBUS.
            raise ChannelError(
                f"the publisher offers slots of {offer.slot_bytes} bytes, which need files of "
                f"{size}, but a descriptor has {facts.st_size}"
            )


def close_descriptors(descriptors: Sequence[int]) -> None:
    """Close every one."""
    for descriptor in descriptors:
        os.close(descriptor)
