"""Chunks that arrive damaged are read again; a lost source is replaced in mid-transfer; relays."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

from weightplane import (
    Channel,
    Connection,
    Layout,
    Publisher,
    Relay,
    Subscriber,
    TransferError,
    VersionError,
    channel_pair,
)
from weightplane.p2p.shm import ShmReader
from weightplane.transfer import RUN_BYTES


class UnreliableReader(ShmReader):
    """Spoils the first read of a version in one of the ways a network does."""

    def __init__(self, offer, fault):
        super().__init__(offer)
        self.fault = fault
        self.reads = 0

    def read(self, slot, offset, destination):
        super().read(slot, offset, destination)
        self.reads += 1
        if self.reads != 1 or not len(destination):
            return
        half = len(destination) // 2
        if self.fault == "corrupted":
            destination[half] ^= 1
        elif self.fault == "truncated":
            destination[half:] = bytes(len(destination) - half)
        elif self.fault == "duplicated":
            destination[half : 2 * half] = bytes(destination[:half])
        elif self.fault == "reordered":
            front = bytes(destination[:half])
            destination[:half] = destination[half : 2 * half]
            destination[half : 2 * half] = front


@pytest.mark.parametrize("fault", ["corrupted", "truncated", "duplicated", "reordered"])
def test_a_damaged_chunk_is_caught_and_read_again(publisher, join, state, same, caplog, fault):
    engine = join(publisher, readers={"shm": lambda offer: UnreliableReader(offer, fault)})
    publisher.wait_subscribers(1, 10)
    with caplog.at_level(logging.WARNING, logger="weightplane"):
        publisher.publish(state(1), 1)
        assert publisher.wait(1, 10).staged_everywhere
    assert same(engine.commit(1).tensors, state(1))
    assert "is read again (1 of 2)" in caplog.text


@pytest.fixture(scope="module")
def big():
    """Four tensors, each longer than a run."""
    weights = {
        f"layer.{index}": torch.full((RUN_BYTES // 2 + 1000,), float(index)).bfloat16()
        for index in range(4)
    }
    return weights, Layout.of(weights)


def attach(publisher):
    ours, theirs = channel_pair()
    publisher.attach(Channel(ours))
    return Channel(theirs)


def test_a_version_is_finished_from_another_source_where_the_first_one_stopped(big, same, caplog):
    weights, layout = big
    reads = []

    class FailingReader(ShmReader):
        def read(self, slot, offset, destination):
            reads.append((offset, len(destination)))
            if len(reads) == 5:
                raise TransferError("the source died")
            super().read(slot, offset, destination)

    with Publisher(layout) as first, Publisher(layout) as second:
        for publisher in (first, second):
            publisher.publish(weights, 7)
        readers = {"shm": FailingReader}
        with Subscriber(attach(first), layout, readers=readers, share=False) as engine:
            first.wait_subscribers(1, 10)
            assert first.wait(7, 20).failed
            assert engine.staged() is None
            with caplog.at_level(logging.WARNING, logger="weightplane"):
                engine.reattach(attach(second))
                assert engine.wait_staged(20).number == 7
            assert same(engine.commit(7).tensors, weights)
            assert "is finished here" in caplog.text
            transfer = engine.records()[-1].transfer
            assert transfer is not None
            assert 0 < transfer.byte_count < layout.byte_count
            assert second.wait(7, 10).staged_everywhere


def test_what_is_active_survives_a_change_of_source_and_is_reported_to_the_new_one(
    layout, state, same, eventually
):
    with Publisher(layout) as first, Publisher(layout) as second:
        for publisher in (first, second):
            publisher.publish(state(1), 1)
        with Subscriber(attach(first), layout) as engine:
            engine.wait_staged(10)
            engine.commit(1)
            first.close()
            engine.reattach(attach(second))
            second.wait_subscribers(1, 10)
            eventually(lambda: second.report(1).deliveries[0].record.state == "committed")
            assert same(engine.tensors, state(1))
            second.publish(state(2), 2)
            assert engine.wait_staged(10).number == 2
            assert same(engine.commit(2).tensors, state(2))
            assert same(engine.rollback().tensors, state(1))


def test_one_number_never_stands_for_two_sets_of_weights(layout, state, eventually):
    with Publisher(layout) as first, Publisher(layout) as second:
        first.publish(state(1), 1)
        second.publish(state(2), 1)
        with Subscriber(attach(first), layout) as engine:
            engine.wait_staged(10)
            engine.commit(1)
            engine.reattach(attach(second))
            eventually(lambda: engine.status().connection is Connection.LOST)
            assert "one number stands for one set of weights" in engine.status().reason
            with pytest.raises(VersionError):
                engine.wait_staged(5)


def test_a_relay_serves_on_what_it_received_and_each_byte_leaves_the_source_once(
    layout, state, same
):
    with Publisher(layout) as source, Relay(attach(source), layout) as relay:
        source.wait_subscribers(1, 10)
        engines = [Subscriber(attach(relay.publisher), layout) for _ in range(3)]
        relay.publisher.wait_subscribers(3, 10)
        for number in range(3):
            version = source.publish(state(number), number)
            for engine in engines:
                staged = engine.wait_staged(10)
                assert (staged.number, staged.manifest) == (number, version.manifest)
                assert same(engine.commit(number).tensors, state(number))
        assert len(source.report(2).deliveries) == 1
        for engine in engines:
            engine.close()


def test_engines_behind_a_relay_that_dies_go_on_with_the_source(layout, state, same, eventually):
    with Publisher(layout) as source:
        relay = Relay(attach(source), layout)
        source.wait_subscribers(1, 10)
        with Subscriber(attach(relay.publisher), layout) as engine:
            source.publish(state(1), 1)
            engine.wait_staged(10)
            engine.commit(1)
            relay.close()
            eventually(lambda: engine.status().connection is Connection.LOST)
            source.publish(state(2), 2)
            engine.reattach(attach(source))
            assert engine.wait_staged(10).number == 2
            assert same(engine.commit(2).tensors, state(2))


def test_a_late_joiner_catches_up_from_a_peer_while_the_source_is_gone(layout, state, same):
    source = Publisher(layout)
    with Relay(attach(source), layout) as relay:
        source.wait_subscribers(1, 10)
        source.publish(state(3), 3)
        relay.wait_served(3, 10)
        source.close()
        with Subscriber(attach(relay.publisher), layout) as engine:
            assert engine.wait_staged(10).number == 3
            assert same(engine.commit(3).tensors, state(3))


def test_a_closed_relay_leaves_no_thread(layout, eventually):
    with Publisher(layout) as source:
        threads = threading.active_count()
        Relay(attach(source), layout).close()
        eventually(lambda: threading.active_count() == threads)
