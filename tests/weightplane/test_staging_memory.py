"""What memory staging takes, and when a buffer may be overwritten."""

from __future__ import annotations

import os
import threading
import time

import torch


def stage(publisher, subscriber, weights, number):
    publisher.publish(weights, number)
    publisher.wait(number, 10)
    assert subscriber.staged().number == number


def test_memory_does_not_grow_over_many_swaps(publisher, join, state, open_files):
    engine = join(publisher, share=False)
    publisher.wait_subscribers(1, 10)
    addresses = set()

    def swap(first: int, count: int) -> None:
        for number in range(first, first + count):
            stage(publisher, engine, state(number), number)
            engine.commit(number)
            addresses.add(engine.tensors["embedding"].data_ptr())

    swap(0, 10)
    files, threads, resident = open_files().keys(), threading.active_count(), resident_bytes()
    swap(10, 60)
    assert engine.status().buffers == 3
    assert len(addresses) == 3
    assert open_files().keys() == files
    assert threading.active_count() == threads
    assert resident_bytes() - resident < 8 << 20


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:  # noqa: PTH123
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_weights_the_engine_still_holds_are_never_overwritten(publisher, join, state, same):
    engine = join(publisher, share=False)
    publisher.wait_subscribers(1, 10)
    stage(publisher, engine, state(1), 1)
    held = dict(engine.commit(1).tensors)
    row = held["embedding"][3]
    for number in range(2, 6):
        stage(publisher, engine, state(number), number)
        engine.commit(number)
        assert same(held, state(1))
    del held
    stage(publisher, engine, state(6), 6)
    engine.commit(6)
    assert torch.equal(row, state(1)["embedding"][3])
    assert engine.status().buffers == 4


def test_a_version_waits_for_the_engine_to_let_go_and_is_staged_then(
    publisher, join, state, same, eventually
):
    engine = join(publisher, share=False, retain=0, stage_ahead=1)
    publisher.wait_subscribers(1, 10)
    held = []
    for number in (1, 2):
        stage(publisher, engine, state(number), number)
        held.append(engine.commit(number).tensors)
    publisher.publish(state(3), 3)
    time.sleep(0.1)
    assert engine.staged() is None
    held.clear()
    eventually(lambda: engine.staged() is not None)
    assert same(engine.commit(3).tensors, state(3))


def test_a_version_that_finds_no_memory_is_aborted_and_says_why(publisher, join, state):
    engine = join(publisher, share=False, retain=0, stage_ahead=1, buffer_wait_seconds=0.05)
    publisher.wait_subscribers(1, 10)
    held = []
    for number in (1, 2):
        stage(publisher, engine, state(number), number)
        held.append(engine.commit(number).tensors)
    publisher.publish(state(3), 3)
    (failed,) = publisher.wait(3, 10).failed
    assert "the engine still holds tensors of all 2" in failed.record.reason
    assert engine.active.number == 2
    held.clear()
    stage(publisher, engine, state(4), 4)
