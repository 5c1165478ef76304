"""Engines that compute with their publisher's slots, where they lie."""

from __future__ import annotations

import random
import signal
from dataclasses import replace

import pytest
import torch

from weightplane import (
    Channel,
    DigestMismatchError,
    Publisher,
    StalledError,
    Subscriber,
    channel_pair,
)
from weightplane.p2p.shm import ShmReader, ShmTransport


@pytest.fixture(params=[2, 3, 4], ids=lambda slots: f"{slots} slots")
def any_publisher(request, layout):
    with Publisher(layout, slots=request.param, stall_seconds=5.0) as publisher:
        yield publisher


def serve(publisher, engines, weights, number):
    publisher.publish(weights, number)
    assert publisher.wait(number, 10).staged_everywhere
    return [engine.commit(number) for engine in engines]


def test_nothing_is_copied(publisher, join, state, same):
    engine = join(publisher)
    publisher.wait_subscribers(1, 10)
    serve(publisher, [engine], state(1), 1)
    assert same(engine.tensors, state(1))
    assert engine.status().buffers == 0
    (record,) = engine.records()
    assert record.transfer.copy_seconds == 0 and record.transfer.byte_count > 0


def test_weights_the_engine_still_holds_are_never_overwritten(any_publisher, join, state, same):
    engines = [join(any_publisher), join(any_publisher, retain=0)]
    any_publisher.wait_subscribers(2, 10)
    held = []
    for number in range(1, 9):
        swaps = serve(any_publisher, engines, state(number), number)
        held.append((number, dict(swaps[number % 2].tensors)))
        for earlier, tensors in held:
            assert same(tensors, state(earlier))
    row = held[2][1]["embedding"][3]
    held.clear()
    for number in range(9, 13):
        serve(any_publisher, engines, state(number), number)
    assert torch.equal(row, state(3)["embedding"][3])


def test_what_an_engine_writes_stays_its_own_and_is_gone_with_the_version(
    any_publisher, join, state, same
):
    first, second = join(any_publisher), join(any_publisher)
    any_publisher.wait_subscribers(2, 10)
    for number in range(1, 9):
        serve(any_publisher, [first, second], state(number), number)
        assert same(first.tensors, state(number))
        first.tensors["embedding"].zero_()
        first.tensors["scale"].add_(1)
        with pytest.raises(DigestMismatchError, match="'embedding'"):
            first.verify()
        second.verify()
        assert same(second.tensors, state(number))


def test_rolling_back_gives_the_old_bits_whoever_needed_the_slot(any_publisher, join, state, same):
    engine, other = join(any_publisher), join(any_publisher)
    any_publisher.wait_subscribers(2, 10)
    for number in (1, 2):
        serve(any_publisher, [engine, other], state(number), number)
    for number in range(3, 9):
        serve(any_publisher, [other], state(number), number)
    assert same(engine.tensors, state(2))
    engine.rollback()
    assert same(engine.tensors, state(1))
    engine.verify()
    engine.commit(8)
    assert same(engine.tensors, state(8))


def test_a_bit_that_flips_in_a_slot_is_found_and_named(layout, join, state):
    class FlippingTransport(ShmTransport):
        def seal(self, slot):
            self.buffer(slot)[5] ^= 1
            super().seal(slot)

    with Publisher(layout, transport=FlippingTransport(layout.size, 3)) as publisher:
        engine = join(publisher)
        publisher.wait_subscribers(1, 10)
        publisher.publish(state(1), 1)
        (delivery,) = publisher.wait(1, 10).deliveries
    assert layout.tensors[0].name in delivery.record.reason
    assert engine.staged() is None


def test_tensors_outlive_their_subscriber_and_the_publisher_goes_on(
    publisher, join, state, same, eventually
):
    engine = join(publisher)
    publisher.wait_subscribers(1, 10)
    (swap,) = serve(publisher, [engine], state(1), 1)
    held = dict(swap.tensors)
    del swap
    engine.close()
    eventually(lambda: not any(peer.state == "ready" for peer in publisher.subscribers()))
    late = None
    for number in range(2, 7):
        publisher.publish(state(number), number)
        late = late or join(publisher)
        assert late.wait_staged(10).number == number
        late.commit(number)
        assert same(late.tensors, state(number))
        assert same(held, state(1))


def test_a_killed_engine_gives_its_slots_back(layout, state, engine):
    with Publisher(layout, slots=2, stall_seconds=20.0) as publisher:
        for number in range(1, 4):
            process = engine(layout)
            publisher.attach(process.channel)
            publisher.wait_subscribers(1, 60)
            publisher.publish(state(number), number)
            assert process.ask("wait_staged") == number
            process.ask("commit", number=number)
            process.signal(signal.SIGKILL)


def test_an_engine_that_stands_still_keeps_its_weights_and_nobody_else_waits(
    layout, state, same, engine, join, eventually
):
    with Publisher(layout, slots=2, stall_seconds=0.4) as publisher:
        process = engine(layout, "--name", "stopped")
        publisher.attach(process.channel)
        publisher.wait_subscribers(1, 60)
        publisher.publish(state(1), 1)
        assert process.ask("wait_staged") == 1
        process.ask("commit", number=1)
        before = process.ask("digests")
        process.signal(signal.SIGSTOP)
        publisher.publish(state(2), 2)
        other = join(publisher)
        with pytest.raises(StalledError, match="'stopped'"):
            publisher.wait(2, 5)
        publisher.detach("stopped")
        for number in range(3, 9):
            publisher.publish(state(number), number)
            assert publisher.wait(number, 10).staged_everywhere
            other.commit(number)
            assert same(other.tensors, state(number))
        process.signal(signal.SIGCONT)
        assert process.ask("digests") == before
        assert process.ask("active") == 1


def test_a_slot_that_nobody_gives_back_is_replaced_and_everybody_told(
    publisher, join, state, same, caplog
):
    """The lock of a stranger stands for whoever keeps a slot and cannot answer."""
    engine = join(publisher)
    publisher.wait_subscribers(1, 10)
    serve(publisher, [engine], state(1), 1)
    stranger = reader_of(publisher)
    kept = [stranger.share(slot, claim) for slot in range(2) for claim in (1, 2)]
    serve(publisher, [engine], state(2), 2)
    kept += [stranger.share(slot, claim) for slot in range(2) for claim in (1, 2)]
    assert sum(version is not None for version in kept) >= 2
    for number in range(3, 7):
        serve(publisher, [engine], state(number), number)
        assert same(engine.tensors, state(number))
    assert "replaced by fresh memory" in caplog.text
    for version in kept:
        if version is not None:
            version.release()
    stranger.close()


def reader_of(publisher):
    """A reader that no subscriber owns, opened through /proc as a process of this user may."""
    return ShmReader(replace(publisher._transport.offer, descriptors=()))


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_events_leaves_every_tensor_with_its_bits(layout, join, state, same, seed):
    choose = random.Random(seed)
    states = [state(number) for number in range(60)]
    with Publisher(layout, slots=choose.choice((2, 3, 4)), stall_seconds=10.0) as publisher:
        engines = [join(publisher, retain=choose.choice((0, 1, 2))) for _ in range(3)]
        publisher.wait_subscribers(3, 10)
        held: list[tuple[int, dict[str, torch.Tensor]]] = []
        for number in range(1, 60):
            publisher.publish(states[number], number)
            assert publisher.wait(number, 20).staged_everywhere
            for engine in engines:
                if choose.random() < 0.6:
                    staged = [version.number for version in engine.status().staged]
                    swap = engine.commit(choose.choice(staged))
                    if choose.random() < 0.3:
                        held.append((swap.version.number, dict(swap.tensors)))
                if engine.status().retained and choose.random() < 0.1:
                    engine.rollback()
                if engine.active is not None:
                    assert same(engine.tensors, states[engine.active.number])
            while len(held) > 4:
                held.pop(choose.randrange(len(held)))
            for earlier, tensors in held:
                assert same(tensors, states[earlier])


def test_a_gateway_without_descriptors_shares_too(layout, state, same):
    ours, theirs = channel_pair()
    with Publisher(layout) as publisher:
        publisher.attach(Channel(ours, carries_descriptors=False))
        with Subscriber(Channel(theirs), layout) as engine:
            publisher.wait_subscribers(1, 10)
            for number in range(1, 6):
                serve(publisher, [engine], state(number), number)
                assert same(engine.tensors, state(number))
            assert engine.status().buffers == 0
