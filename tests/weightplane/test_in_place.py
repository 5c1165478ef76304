"""One buffer only: versions take the place of what serves, under a pause of the owner."""

from __future__ import annotations

import pytest

from weightplane import (
    CommitRefusedError,
    EventKind,
    InvalidArgumentError,
    StalledError,
    TransferError,
    VersionError,
)
from weightplane.p2p.shm import ShmReader


def wait_offered(engine, number, eventually):
    seen = []
    eventually(
        lambda: seen.extend(engine.events()) or (EventKind.OFFERED, number) in
        [(event.kind, event.number) for event in seen]
    )  # fmt: skip


def test_versions_take_each_others_place_in_one_buffer(publisher, join, state, same, eventually):
    engine = join(publisher, in_place=True, retain=0)
    publisher.wait_subscribers(1, 10)
    publisher.publish(state(0), 0)
    engine.commit(engine.wait_staged(10).number)
    address = engine.tensors["embedding"].data_ptr()
    held = engine.tensors["embedding"]
    for number in range(1, 5):
        publisher.publish(state(number), number)
        wait_offered(engine, number, eventually)
        assert same(engine.tensors, state(number - 1))
        assert publisher.report(number).pending
        swap = engine.replace(number)
        assert (swap.version.number, swap.previous.number) == (number, number - 1)
        assert same(engine.tensors, state(number))
        assert engine.tensors["embedding"].data_ptr() == address
        assert held.equal(state(number)["embedding"])
        assert publisher.wait(number, 10).staged_everywhere
    assert engine.status().buffers == 1
    with pytest.raises(VersionError, match="no previous"):
        engine.rollback()


def test_a_newer_offer_takes_the_place_of_one_that_nobody_paused_for(
    publisher, join, state, same, eventually
):
    engine = join(publisher, in_place=True, retain=0)
    publisher.wait_subscribers(1, 10)
    for number in range(4):
        publisher.publish(state(number), number)
        if number == 0:
            engine.commit(engine.wait_staged(10).number)
    wait_offered(engine, 3, eventually)
    assert "came before the owner paused" in publisher.wait(1, 10).failed[0].record.reason
    with pytest.raises(VersionError, match="1 is aborted"):
        engine.replace(1)
    assert same(engine.tensors, state(0))
    engine.replace(3)
    assert same(engine.tensors, state(3))


def test_a_failed_transfer_leaves_nothing_active_and_the_next_version_heals_it(
    publisher, join, state, same, eventually
):
    class FailingReader(ShmReader):
        broken = False

        def read(self, slot, offset, destination):
            super().read(slot, offset, destination)
            if FailingReader.broken:
                raise TransferError("the link went down")

    engine = join(publisher, in_place=True, retain=0, readers={"shm": FailingReader})
    publisher.wait_subscribers(1, 10)
    publisher.publish(state(0), 0)
    engine.commit(engine.wait_staged(10).number)
    publisher.publish(state(1), 1)
    wait_offered(engine, 1, eventually)
    FailingReader.broken = True
    with pytest.raises(VersionError, match="did not arrive: the link went down"):
        engine.replace(1)
    assert engine.active is None
    with pytest.raises(VersionError, match="commit one first"):
        _ = engine.tensors
    FailingReader.broken = False
    publisher.publish(state(2), 2)
    assert same(engine.commit(engine.wait_staged(10).number).tensors, state(2))


def test_a_cache_that_cannot_be_invalidated_keeps_the_old_version(
    publisher, join, state, same, eventually
):
    engine = join(publisher, in_place=True, retain=0)
    publisher.wait_subscribers(1, 10)
    publisher.publish(state(0), 0)
    engine.commit(engine.wait_staged(10).number)

    def refuse(new, old):
        raise OSError("the disk tier does not answer")

    engine.register_cache("disk tier", refuse)
    publisher.publish(state(1), 1)
    wait_offered(engine, 1, eventually)
    with pytest.raises(CommitRefusedError, match="disk tier"):
        engine.replace(1)
    assert same(engine.tensors, state(0))


def test_settings_that_contradict_each_other_are_refused(publisher, join, state):
    with pytest.raises(InvalidArgumentError, match="retain is 1"):
        join(publisher, in_place=True)
    engine = join(publisher)
    with pytest.raises(InvalidArgumentError, match="in_place=True"):
        engine.replace(1)
    assert StalledError is not None
