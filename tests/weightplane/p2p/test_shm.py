"""Shared memory that has no name, and errors that say what to do."""

from __future__ import annotations

import mmap
import os
import subprocess
from pathlib import Path

import pytest

from weightplane.errors import ChannelError, InvalidArgumentError, ShmSpaceError
from weightplane.p2p import Offer
from weightplane.p2p.shm import ShmReader, ShmTransport, create_anonymous_file, free_bytes

MEGABYTE = 1 << 20


@pytest.fixture
def small_tmpfs(tmp_path):
    """A tmpfs of eight megabytes, where the tests may mount one."""
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(tmp_path)], capture_output=True
    )
    if mount.returncode:
        pytest.skip("mounting a tmpfs needs privileges")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def read(transport: ShmTransport, slot: int, offset: int, count: int) -> bytes:
    offer = transport.offer
    duplicates = tuple(os.dup(descriptor) for descriptor in offer.descriptors)
    reader = ShmReader(Offer(offer.transport, offer.slots, offer.slot_bytes, duplicates))
    target = bytearray(count)
    reader.read(slot, offset, memoryview(target))
    reader.close()
    reader.close()
    return bytes(target)


def test_a_reader_sees_what_lies_in_each_slot():
    transport = ShmTransport(8192, slots=3)
    for slot in range(3):
        transport.buffer(slot)[4000:4004] = bytes([slot] * 4)
    assert [read(transport, slot, 4000, 4) for slot in range(3)] == [
        bytes([s] * 4) for s in (0, 1, 2)
    ]
    transport.close()
    transport.close()


def test_slots_never_have_a_name():
    before = set(Path("/dev/shm").iterdir())
    transport = ShmTransport(MEGABYTE)
    assert set(Path("/dev/shm").iterdir()) <= before
    for descriptor in transport.offer.descriptors:
        assert os.fstat(descriptor).st_nlink == 0
    transport.close()


def test_descriptors_and_space_come_back(open_files, small_tmpfs):
    before, free = open_files(), free_bytes(small_tmpfs)
    assert free is not None
    transport = ShmTransport(3 * MEGABYTE, slots=2, directory=small_tmpfs)
    # One more page per slot holds its stamp.
    assert free_bytes(small_tmpfs) == free - 2 * (3 * MEGABYTE + mmap.PAGESIZE)
    transport.close()
    assert free_bytes(small_tmpfs) == free
    assert open_files().keys() == before.keys()


def test_a_full_tmpfs_is_one_error_that_names_bytes_and_the_fix(open_files, small_tmpfs):
    before, free = open_files(), free_bytes(small_tmpfs)
    assert free is not None
    needed = 2 * 5 * MEGABYTE
    with pytest.raises(ShmSpaceError, match=rf"{needed} bytes .* {free} bytes are free.*shm-size"):
        ShmTransport(5 * MEGABYTE, slots=2, directory=small_tmpfs)
    assert free_bytes(small_tmpfs) == free
    assert open_files().keys() == before.keys()


def test_a_tmpfs_that_fills_up_meanwhile_leaves_nothing_behind(open_files, small_tmpfs):
    before, free = open_files(), free_bytes(small_tmpfs)
    assert free is not None
    with pytest.raises(ShmSpaceError, match="9437184 bytes"):
        create_anonymous_file(9 * MEGABYTE, small_tmpfs)
    assert free_bytes(small_tmpfs) == free
    assert open_files().keys() == before.keys()


def test_a_missing_directory_falls_back_to_memory_without_a_name(tmp_path):
    descriptor = create_anonymous_file(8192, tmp_path / "absent")
    facts = os.fstat(descriptor)
    assert (facts.st_size, facts.st_nlink) == (8192, 0)
    os.close(descriptor)


def test_a_descriptor_shorter_than_promised_is_refused_before_it_can_kill(open_files):
    before = open_files()
    descriptor = create_anonymous_file(4096)
    with pytest.raises(ChannelError, match=r"slots of 8192 bytes, .* but a descriptor has 4096"):
        ShmReader(Offer("shm", 1, 8192, (descriptor,)))
    assert open_files().keys() == before.keys()


def test_a_descriptor_that_is_no_file_is_refused(open_files):
    before = open_files()
    with pytest.raises(ChannelError):
        ShmReader(Offer("shm", 2, 4096, os.pipe()))
    assert open_files().keys() == before.keys()


def test_missing_descriptors_are_refused():
    with pytest.raises(ChannelError, match="2 slots and 0 descriptors"):
        ShmReader(Offer("shm", 2, 4096))


@pytest.mark.parametrize(("slot_bytes", "slots"), [(0, 2), (4096, 0), (4096, 17)])
def test_impossible_sizes_are_refused(slot_bytes, slots):
    with pytest.raises(InvalidArgumentError):
        ShmTransport(slot_bytes, slots)
