"""The engine's side: joining, waiting, events, and an end that leaves everything serving."""

from __future__ import annotations

import gc
import select
import threading
import time

import pytest

from weightplane import (
    Channel,
    ClosedError,
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
