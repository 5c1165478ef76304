"""The engine's side: staging, committing, rolling back, and what memory it takes."""

from __future__ import annotations

import gc
import os
import select
import threading
import time

import pytest
import torch

from weightplane import (
    Channel,
    ClosedError,
    CommitRefusedError,
    Connection,
    DigestMismatchError,
    EventKind,
    InvalidArgumentError,
    LayoutMismatchError,
    Publisher,
    PublisherGoneError,
    StalledError,
    Subscriber,
    VersionError,
    VersionState,
    channel_pair,
)
from weightplane.layout import Layout
from weightplane.p2p.shm import ShmReader


class GatedReader(ShmReader):
    """Reads shared memory, but only while its gate is open."""

    gate: threading.Event

    def read(self, slot, offset, destination):
        if not self.gate.wait(10):
            raise RuntimeError("the test never opened the gate")
        super().read(slot, offset, destination)


def gated(gate):
    def open_reader(offer):
        reader = GatedReader(offer)
        reader.gate = gate
        return reader

    return {"shm": open_reader}


def stage(publisher, subscriber, weights, number):
    publisher.publish(weights, number)
    publisher.wait(number, 10)
    assert subscriber.staged().number == number


def test_nothing_is_active_before_the_first_commit(publisher, join):
    engine = join(publisher)
    assert engine.active is None
    assert engine.staged() is None
    with pytest.raises(VersionError, match="commit one first"):
        _ = engine.tensors


def test_a_committed_version_is_exactly_what_was_published(publisher, join, state, same):
    engine = join(publisher)
    publisher.wait_subscribers(1, 10)
    for number in range(1, 5):
        stage(publisher, engine, state(number), number)
        swap = engine.commit(number)
        assert same(swap.tensors, state(number))
        assert same(engine.tensors, state(number))
        assert swap.version == engine.active == publisher.newest
        assert (swap.previous.number if swap.previous else None) == (number - 1 or None)


def test_a_commit_takes_well_under_a_millisecond(publisher, join, state):
    engine = join(publisher)
    publisher.wait_subscribers(1, 10)
    pauses = []
    for number in range(20):
        stage(publisher, engine, state(number), number)
        pauses.append(engine.commit(number).pause_seconds)
    assert sorted(pauses)[len(pauses) // 2] < 0.0005


def test_a_swap_names_the_tensors_that_changed(publisher, join, state):
    engine = join(publisher)
    publisher.wait_subscribers(1, 10)
    weights = state(1)
    stage(publisher, engine, weights, 1)
    assert engine.commit(1).changed_tensors() == tuple(sorted(weights))
    weights["layers.0.router"][1, 1] += 1
    weights["scale"] += 1
    stage(publisher, engine, weights, 2)
    assert engine.commit(2).changed_tensors() == ("layers.0.router", "scale")
    assert engine.rollback().changed_tensors() == ("layers.0.router", "scale")


def test_rolling_back_serves_the_previous_bits_and_retires_the_newer(publisher, join, state, same):
    engine = join(publisher, retain=2)
    publisher.wait_subscribers(1, 10)
    for number in (1, 2, 3):
        stage(publisher, engine, state(number), number)
        engine.commit(number)
    assert [version.number for version in engine.status().retained] == [2, 1]
    for number in (2, 1):
        swap = engine.rollback()
        assert swap.version.number == number
        assert swap.previous is not None
        assert swap.previous.number == number + 1
        assert same(engine.tensors, state(number))
    with pytest.raises(VersionError, match="no previous weight version"):
        engine.rollback()
    with pytest.raises(VersionError, match=r"3 is retired \(rolled back to weight version 2\)"):
        engine.commit(3)
    stage(publisher, engine, state(4), 4)
    assert same(engine.commit(4).tensors, state(4))


def test_without_retention_there_is_nothing_to_roll_back_to(publisher, join, state):
    engine = join(publisher, retain=0)
    publisher.wait_subscribers(1, 10)
    for number in (1, 2):
        stage(publisher, engine, state(number), number)
        engine.commit(number)
    with pytest.raises(VersionError, match="no previous"):
        engine.rollback()


def test_the_owner_may_skip_to_a_newer_version(publisher, join, state, same):
    engine = join(publisher)
    publisher.wait_subscribers(1, 10)
    stage(publisher, engine, state(1), 1)
    stage(publisher, engine, state(2), 2)
    assert [version.number for version in engine.status().staged] == [1, 2]
    assert engine.staged().number == 2
    assert same(engine.commit(2).tensors, state(2))
    with pytest.raises(VersionError, match=r"1 is retired \(skipped: weight version 2 was commit"):
        engine.commit(1)


def test_an_older_staged_version_stays_committable_beside_a_newer_one(publisher, join, state, same):
    engine = join(publisher)
    publisher.wait_subscribers(1, 10)
    stage(publisher, engine, state(1), 1)
    stage(publisher, engine, state(2), 2)
    assert same(engine.commit(1).tensors, state(1))
    assert same(engine.commit(2).tensors, state(2))


@pytest.mark.parametrize("stage_ahead", [1, 2, 3])
def test_staged_versions_beyond_the_limit_retire_unseen_oldest_first(
    publisher, join, state, stage_ahead
):
    engine = join(publisher, stage_ahead=stage_ahead)
    publisher.wait_subscribers(1, 10)
    for number in range(6):
        stage(publisher, engine, state(number), number)
    expected = list(range(6 - stage_ahead, 6))
    assert [version.number for version in engine.status().staged] == expected
    with pytest.raises(VersionError, match=r"0 is retired .*unseen"):
        engine.commit(0)


def test_memory_does_not_grow_over_many_swaps(publisher, join, state, open_files):
    engine = join(publisher)
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
    engine = join(publisher)
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
    engine = join(publisher, retain=0, stage_ahead=1)
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
    engine = join(publisher, retain=0, stage_ahead=1, buffer_wait_seconds=0.05)
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


def test_caches_are_invalidated_before_the_swap_and_named_in_its_record(publisher, join, state):
    engine = join(publisher)
    publisher.wait_subscribers(1, 10)
    calls = []

    def invalidate(new, old):
        calls.append((engine.active and engine.active.number, old and old.number, new.number))

    engine.register_cache("prefix cache", invalidate)
    engine.register_cache("fused projections", lambda new, old: None)
    for number in (1, 2):
        stage(publisher, engine, state(number), number)
        assert engine.commit(number).invalidated == ("prefix cache", "fused projections")
    engine.rollback()
    assert calls == [(None, None, 1), (1, 1, 2), (2, 2, 1)]
    with pytest.raises(InvalidArgumentError, match="'prefix cache' is registered already"):
        engine.register_cache("prefix cache", invalidate)


def test_a_cache_must_not_commit_while_it_is_invalidated(publisher, join, state):
    engine = join(publisher)
    publisher.wait_subscribers(1, 10)
    stage(publisher, engine, state(1), 1)
    engine.register_cache("reentrant", lambda new, old: engine.commit(new.number) and None)
    with pytest.raises(CommitRefusedError, match="must not commit"):
        engine.commit(1)


def test_a_version_that_is_being_committed_is_not_retired_by_a_newer_one(
    publisher, join, state, same
):
    engine = join(publisher, stage_ahead=1)
    publisher.wait_subscribers(1, 10)
    stage(publisher, engine, state(1), 1)

    def invalidate(new, old):
        if new.number == 1:
            publisher.publish(state(2), 2)
            publisher.wait(2, 10)

    engine.register_cache("slow", invalidate)
    assert same(engine.commit(1).tensors, state(1))
    assert same(engine.commit(2).tensors, state(2))


def test_committing_what_is_not_staged_says_what_it_is(publisher, join, state):
    engine = join(publisher)
    publisher.wait_subscribers(1, 10)
    with pytest.raises(VersionError, match=r"7 was never announced here.*staged versions: none"):
        engine.commit(7)
    stage(publisher, engine, state(1), 1)
    engine.commit(1)
    with pytest.raises(VersionError, match="1 is committed; staged versions: none"):
        engine.commit(1)


def test_events_tell_what_happened_once_and_can_be_selected_on(publisher, join, state):
    engine = join(publisher)
    publisher.wait_subscribers(1, 10)
    stage(publisher, engine, state(1), 1)
    assert select.select([engine], [], [], 5)[0]
    events = engine.events()
    assert [(event.kind, event.number) for event in events] == [
        (EventKind.CONNECTED, None),
        (EventKind.STAGED, 1),
    ]
    assert not select.select([engine], [], [], 0)[0]
    assert engine.events() == ()
    publisher.close()
    assert select.select([engine], [], [], 5)[0]
    (event,) = engine.events()
    assert event.kind is EventKind.LOST
    assert "the publisher was closed" in event.reason


def test_records_tell_the_whole_timeline(publisher, join, state):
    engine = join(publisher)
    publisher.wait_subscribers(1, 10)
    began = time.monotonic()
    for number in (1, 2, 3):
        stage(publisher, engine, state(number), number)
        swap = engine.commit(number)
    first, second, third = engine.records()
    assert [record.state for record in (first, second, third)] == [
        VersionState.RETIRED,
        VersionState.COMMITTED,
        VersionState.COMMITTED,
    ]
    assert third.transfer is not None
    assert third.transfer.byte_count == engine.layout.byte_count
    assert third.pause_seconds == swap.pause_seconds
    assert third.staged_at is not None
    assert third.committed_at is not None
    assert began < third.announced_at <= third.staged_at <= third.committed_at <= time.monotonic()


def test_a_publisher_that_is_gone_leaves_everything_serving(layout, join, state, same):
    publisher = Publisher(layout)
    engine = join(publisher)
    publisher.wait_subscribers(1, 10)
    for number in (1, 2):
        stage(publisher, engine, state(number), number)
        engine.commit(number)
    stage(publisher, engine, state(3), 3)
    publisher.close()
    with pytest.raises(PublisherGoneError, match="what is active keeps serving"):
        while True:
            engine.wait_staged(10)
            engine.commit(3)
    assert same(engine.tensors, state(3))
    assert same(engine.rollback().tensors, state(2))
    status = engine.status()
    assert status.connection is Connection.LOST
    assert "the publisher was closed" in status.reason


def test_waiting_for_a_version_ends_at_its_timeout(publisher, join, state):
    gate = threading.Event()
    engine = join(publisher, readers=gated(gate))
    publisher.publish(state(1), 1)
    with pytest.raises(StalledError, match=r"in 0\.2 seconds; the publisher is"):
        engine.wait_staged(0.2)
    gate.set()
    assert engine.wait_staged(10).number == 1


def test_another_layout_is_refused_on_joining(publisher, join, state):
    other = state(0)
    del other["scale"]
    engine = join(publisher, layout=Layout.of(other))
    with pytest.raises(LayoutMismatchError, match="'scale' is missing"):
        engine.wait_staged(10)


def test_an_unknown_transport_is_refused(publisher, join):
    engine = join(publisher, readers={"rdma": ShmReader})
    with pytest.raises(Exception, match="transport 'shm'; this subscriber knows rdma"):
        engine.wait_staged(10)


def test_a_write_into_the_active_weights_is_found_on_request(publisher, join, state):
    engine = join(publisher)
    publisher.wait_subscribers(1, 10)
    stage(publisher, engine, state(1), 1)
    engine.commit(1)
    engine.verify()
    engine.tensors["layers.3.weight"][0] = 0
    with pytest.raises(DigestMismatchError, match=r"layers\.3\.weight"):
        engine.verify()


def test_closing_is_idempotent_bounded_and_leaves_held_tensors_valid(publisher, join, state, same):
    engine = join(publisher)
    publisher.wait_subscribers(1, 10)
    stage(publisher, engine, state(1), 1)
    held = engine.commit(1).tensors
    engine.close()
    engine.close()
    gc.collect()
    assert same(held, state(1))
    assert engine.active is None
    for use in (lambda: engine.commit(1), engine.rollback, lambda: engine.wait_staged(1)):
        with pytest.raises((ClosedError, VersionError)):
            use()


def test_closing_interrupts_staging_and_the_wait_for_memory(publisher, join, state):
    engine = join(publisher, retain=0, stage_ahead=1)
    publisher.wait_subscribers(1, 10)
    held = []
    for number in (1, 2):
        stage(publisher, engine, state(number), number)
        held.append(engine.commit(number).tensors)
    publisher.publish(state(3), 3)
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < 2.0
    assert publisher.wait(3, 10).failed


def test_a_thread_that_cannot_end_is_named(publisher, join, state):
    gate = threading.Event()
    engine = join(publisher, readers=gated(gate), name="wedged")
    publisher.wait_subscribers(1, 10)
    publisher.publish(state(1), 1)
    time.sleep(0.1)
    with pytest.raises(StalledError, match=r"weightplane-wedged did not end in 0\.05 seconds"):
        engine.close(timeout=0.05)
    gate.set()


@pytest.mark.parametrize("options", [{"retain": -1}, {"stage_ahead": 0}])
def test_impossible_settings_are_refused(layout, options):
    ours, theirs = channel_pair()
    with pytest.raises(InvalidArgumentError):
        Subscriber(Channel(theirs), layout, **options)
    ours.close()
    theirs.close()
