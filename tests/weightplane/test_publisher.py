"""The learner's side."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from weightplane import (
    Channel,
    ClosedError,
    InvalidArgumentError,
    LayoutError,
    Publisher,
    ShmSpaceError,
    StalledError,
    VersionError,
    VersionState,
    channel_pair,
)
from weightplane.layout import Layout, Shard, TensorSpec
from weightplane.messages import (
    PROTOCOL,
    Announce,
    Committed,
    Hello,
    Progress,
    Refused,
    Staged,
    Welcome,
)


class BarePeer:
    """A subscriber that answers only what a test says."""

    def __init__(self, publisher: Publisher, name: str = "bare") -> None:
        ours, theirs = channel_pair()
        publisher.attach(Channel(ours))
        self.channel = Channel(theirs)
        self.channel.send(Hello(PROTOCOL, name, 4242, publisher.layout.to_json()))
        self._unread = self.channel.receive(5)
        self.welcome = self._unread.pop(0)
        assert isinstance(self.welcome.message, Welcome)

    def announce(self) -> Announce:
        if not self._unread:
            self._unread = self.channel.receive(5)
        message = self._unread.pop(0).message
        assert isinstance(message, Announce)
        return message

    def answer_staged(self, number: int) -> None:
        self.channel.send(Staged(number, time.monotonic(), 1, 0.0, 0.0))


@pytest.fixture
def bare(publisher):
    peers = []

    def attach(name="bare", to=None):
        peers.append(BarePeer(to or publisher, name))
        return peers[-1]

    yield attach
    for peer in peers:
        peer.channel.close()
        for descriptor in peer.welcome.descriptors:
            os.close(descriptor)


def test_a_version_is_staged_everywhere_and_reported(publisher, join, state):
    engines = [join(publisher) for _ in range(2)]
    publisher.wait_subscribers(2, 10)
    version = publisher.publish(state(1), 0)
    publication = publisher.wait(0, 10)
    assert publication.staged_everywhere
    assert publication.version == version == publisher.newest
    assert publication.transfer.byte_count == publisher.layout.byte_count
    assert {delivery.subscriber for delivery in publication.deliveries} == {"engine-0", "engine-1"}
    for delivery in publication.deliveries:
        assert delivery.record.state is VersionState.STAGED
        assert delivery.record.transfer is not None
        assert delivery.record.transfer.byte_count == publisher.layout.byte_count
        assert delivery.record.announced_at == publication.announced_at
        assert delivery.record.staged_at is not None
        assert delivery.record.announced_at <= delivery.record.staged_at <= time.monotonic()
    for engine in engines:
        assert engine.wait_staged(10) == version


def test_commits_are_seen_by_the_publisher(publisher, join, state, eventually):
    engine = join(publisher)
    for number in (1, 2):
        publisher.publish(state(number), number)
        engine.commit(engine.wait_staged(10).number)
    eventually(lambda: publisher.subscribers()[0].active == 2)
    record = publisher.report(2).deliveries[0].record
    assert record.state is VersionState.COMMITTED
    assert record.pause_seconds is not None
    assert record.staged_at <= record.committed_at
    engine.rollback()
    eventually(lambda: publisher.subscribers()[0].active == 1)
    assert "rolled back to weight version 1" in publisher.report(2).deliveries[0].record.reason


def test_the_state_is_a_snapshot_that_the_learner_may_change_at_once(publisher, join, state, same):
    weights = state(1)
    publisher.publish(weights, 1)
    for tensor in weights.values():
        tensor.zero_()
    engine = join(publisher)
    assert same(engine.commit(engine.wait_staged(10).number).tensors, state(1))


def test_publishing_does_not_wait_for_subscribers(publisher, bare, state):
    bare()
    began = time.monotonic()
    publisher.publish(state(1), 1)
    publisher.publish(state(2), 2)
    assert time.monotonic() - began < 2.0
    assert publisher.report(2).pending


def test_a_late_subscriber_is_told_of_the_newest_version_at_once(publisher, join, state, same):
    for number in (1, 2, 3):
        publisher.publish(state(number), number)
    engine = join(publisher)
    assert engine.wait_staged(10).number == 3
    assert same(engine.commit(3).tensors, state(3))


def test_the_newest_version_stays_readable_while_the_next_is_written(publisher, bare, state):
    publisher.publish(state(1), 1)
    early = bare().announce()
    publisher.publish(state(2), 2)
    late = bare("late").announce()
    assert (early.number, late.number) == (1, 2)
    assert early.slot != late.slot


def test_with_one_slot_late_joiners_start_from_the_next_version(layout, join, state):
    with Publisher(layout, slots=1) as publisher:
        engine = join(publisher)
        publisher.wait_subscribers(1, 10)
        for number in (1, 2, 3):
            publisher.publish(state(number), number)
            assert publisher.wait(number, 10).staged_everywhere
            assert engine.commit(number).version.number == number


def test_the_watchdog_names_who_holds_the_slots_and_since_when(layout, bare, state):
    with Publisher(layout, slots=2, stall_seconds=0.3) as publisher:
        bare("stuck-engine", to=publisher)
        publisher.publish(state(1), 1)
        publisher.publish(state(2), 2)
        expected = (
            r"weight version 3 finds no free slot of 2: subscriber 'stuck-engine' \(process 4242\) "
            r"holds weight version 1 since 0\.\d s, weight version 2 since 0\.\d s, last progress"
        )
        with pytest.raises(StalledError, match=expected):
            publisher.publish(state(3), 3)
        with pytest.raises(StalledError, match="weight version 2 is not staged everywhere"):
            publisher.wait(2)
        publisher.detach("stuck-engine")
        publisher.publish(state(3), 3)
        assert [peer.reason for peer in publisher.subscribers()] == [
            "detached by the publisher's owner"
        ]


def test_progress_restarts_the_watchdog(layout, bare, state):
    with Publisher(layout, slots=2, stall_seconds=0.5) as publisher:
        peer = bare("slow", to=publisher)
        publisher.publish(state(1), 1)
        publisher.publish(state(2), 2)

        def answer() -> None:
            for step in range(6):
                time.sleep(0.2)
                peer.channel.send(Progress(1, step))
            peer.answer_staged(1)

        thread = threading.Thread(target=answer)
        thread.start()
        publisher.publish(state(3), 3)
        assert publisher.report(3).wait_seconds > 1.0
        thread.join()


def test_a_wait_ends_at_its_timeout_and_says_who_is_missing(publisher, bare, state):
    bare()
    publisher.publish(state(1), 1)
    with pytest.raises(StalledError, match=r"not staged everywhere after 0\.05 seconds: .*'bare'"):
        publisher.wait(1, timeout=0.05)


def test_a_slot_is_free_again_when_its_reader_dies(publisher, bare, state, eventually):
    peer = bare()
    publisher.publish(state(1), 1)
    publisher.publish(state(2), 2)
    peer.channel.close()
    publisher.publish(state(3), 3)
    publication = publisher.wait(2, 5)
    assert not publication.staged_everywhere
    assert "the subscriber is gone: the peer closed" in publication.failed[0].record.reason


def test_a_state_that_does_not_fit_is_refused_before_anything_is_sent(publisher, join, state):
    engine = join(publisher)
    broken = state(1)
    broken["layers.0.router"] = broken["layers.0.router"].bfloat16()
    with pytest.raises(LayoutError, match=r"layers\.0\.router"):
        publisher.publish(broken, 1)
    with pytest.raises(VersionError, match="never published"):
        publisher.report(1)
    publisher.publish(state(1), 1)
    assert engine.wait_staged(10).number == 1
    assert len(engine.records()) == 1


def test_a_failed_copy_announces_nothing_and_frees_its_slot(publisher, state):
    publisher.publish(state(1), 1)
    broken = state(2)
    broken["embedding"] = torch.empty_like(broken["embedding"], device="meta")
    for _ in range(3):
        with pytest.raises((NotImplementedError, RuntimeError)):
            publisher.publish(broken, 2)
    assert publisher.newest is not None
    assert publisher.newest.number == 1
    publisher.publish(state(2), 2)


@pytest.mark.parametrize("number", [5, 4, 0])
def test_numbers_that_do_not_grow_are_refused(publisher, state, number):
    publisher.publish(state(1), 5)
    with pytest.raises(VersionError, match=f"version {number} comes after version 5"):
        publisher.publish(state(1), number)


def test_a_layout_of_parts_is_refused():
    shards = (Shard("a", (0,), (2,), 0), Shard("a", (2,), (2,), 64))
    layout = Layout((TensorSpec("a", (4,), "float32"),), shards, 128)
    with pytest.raises(LayoutError, match="every tensor whole"):
        Publisher(layout)


def test_too_little_shared_memory_is_known_at_construction(open_files):
    before = open_files().keys()
    with pytest.raises(ShmSpaceError, match=r"4611686018427387904 bytes .* use fewer slots"):
        Publisher(Layout.whole([TensorSpec("a", (1 << 61,), "uint8")]), slots=2)
    assert open_files().keys() == before


def test_a_subscriber_with_another_layout_is_refused_by_name(publisher, state, eventually):
    other = state(0)
    other["layers.0.router"] = other["layers.0.router"].bfloat16()
    ours, theirs = channel_pair()
    publisher.attach(Channel(ours))
    channel = Channel(theirs)
    channel.send(Hello(PROTOCOL, "odd", 1, Layout.of(other).to_json()))
    (answer,) = channel.receive(5)
    assert isinstance(answer.message, Refused)
    assert "'layers.0.router' is bfloat16[4, 16] instead of float32" in answer.message.reason
    eventually(lambda: "refused" in publisher.subscribers()[0].reason)
    channel.close()


def test_a_subscriber_of_another_protocol_is_refused(publisher, layout):
    ours, theirs = channel_pair()
    publisher.attach(Channel(ours))
    channel = Channel(theirs)
    channel.send(Hello(PROTOCOL + 1, "new", 1, layout.to_json()))
    (answer,) = channel.receive(5)
    assert isinstance(answer.message, Refused)
    assert answer.message.cause == "protocol"
    channel.close()


@pytest.mark.parametrize(
    "message",
    [
        Staged(9, 0.0, 1, 0.0, 0.0),
        Committed(1, 0.0, 0.0),
        Welcome(1, "", 1, "shm", 1, 1, b""),
        Hello(1, "again", 1, b""),
    ],
)
def test_a_message_out_of_turn_costs_its_sender_the_connection_and_nobody_else(
    publisher, bare, join, state, eventually, message
):
    peer, engine = bare(), join(publisher)
    publisher.wait_subscribers(2, 10)
    publisher.publish(state(1), 1)
    peer.channel.send(message)
    eventually(lambda: any(status.state == "gone" for status in publisher.subscribers()))
    assert engine.wait_staged(10).number == 1
    assert [failed.subscriber for failed in publisher.wait(1, 5).failed] == ["bare"]


def test_garbage_costs_its_sender_the_connection_and_nobody_else(publisher, join, state):
    ours, theirs = channel_pair()
    publisher.attach(Channel(ours))
    theirs.sendall(b"POST /update_weights HTTP/1.1\r\n")
    engine = join(publisher)
    publisher.publish(state(1), 1)
    assert engine.wait_staged(10).number == 1
    with pytest.raises(StalledError, match=r"1 of 2 .*never said hello: the peer does not speak"):
        publisher.wait_subscribers(2, 0.2)
    theirs.close()


def test_waiting_for_subscribers_says_how_many_came(publisher):
    with pytest.raises(StalledError, match=r"0 of 1 subscribers are ready after 0\.01 seconds"):
        publisher.wait_subscribers(1, 0.01)


def test_no_subscriber_is_no_success(publisher, state):
    publisher.publish(state(1), 1)
    assert not publisher.wait(1, 1).staged_everywhere


def test_detaching_an_unknown_subscriber_is_an_error(publisher):
    with pytest.raises(InvalidArgumentError, match="'ghost'"):
        publisher.detach("ghost")


def test_closing_is_idempotent_and_bounded_and_final(layout, bare, state):
    publisher = Publisher(layout)
    bare("silent", to=publisher)
    publisher.publish(state(1), 1)
    began = time.monotonic()
    publisher.close()
    publisher.close()
    assert time.monotonic() - began < 5.0
    for use in (
        lambda: publisher.publish(state(2), 2),
        lambda: publisher.wait(1),
        lambda: publisher.attach(Channel(channel_pair()[0])),
    ):
        with pytest.raises(ClosedError):
            use()


def test_closing_ends_a_publish_that_waits_for_a_slot(layout, bare, state):
    publisher = Publisher(layout, slots=2)
    bare(to=publisher)
    publisher.publish(state(1), 1)
    publisher.publish(state(2), 2)
    timer = threading.Timer(0.2, publisher.close)
    timer.start()
    # Whichever comes first: the slots come free because the reader is dropped, or it is closed.
    with pytest.raises(ClosedError):
        publisher.publish(state(3), 3)
    timer.join()
