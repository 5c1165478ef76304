"""Ten thousand swaps leave nothing behind."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from weightplane import Channel, Layout, Publisher, Subscriber, channel_pair


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def swap_many(count: int, open_files, deltas: bool, share: bool) -> None:
    weights = {"a": torch.zeros(64, 64).bfloat16(), "b": torch.zeros(8)}
    layout = Layout.of(weights)
    segments = set(Path("/dev/shm").iterdir())
    ours, theirs = channel_pair()
    with Publisher(layout, deltas=deltas) as publisher:
        publisher.attach(Channel(ours))
        with Subscriber(Channel(theirs), layout, share=share) as engine:
            publisher.wait_subscribers(1, 10)

            def swap(first: int, last: int) -> None:
                for number in range(first, last):
                    weights["b"][number % 8] = number
                    publisher.publish(weights, number)
                    assert publisher.wait(number, 30).staged_everywhere
                    assert engine.commit(number).tensors["b"][number % 8] == number

            swap(0, 300)
            files, threads = len(open_files()), threading.active_count()
            resident = resident_bytes()
            swap(300, count)
            # The lock of a version that has just retired may still be open.
            assert len(open_files()) <= files + 1
            assert threading.active_count() == threads
            assert resident_bytes() - resident < 16 << 20
            assert engine.status().buffers == (0 if share else 3)
            assert len(engine.records()) < 80
    assert set(Path("/dev/shm").iterdir()) <= segments


@pytest.mark.parametrize(("deltas", "share"), [(False, True), (False, False), (True, False)])
def test_a_thousand_swaps_leave_no_segment_file_thread_or_memory(open_files, deltas, share):
    swap_many(1_000, open_files, deltas, share)


@pytest.mark.slow
def test_ten_thousand_swaps_leave_no_segment_file_thread_or_memory(open_files):
    swap_many(10_000, open_files, deltas=False, share=True)
