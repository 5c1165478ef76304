"""Digests are taken while a slot is written; a version is shown only if all of them are right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from weightplane import DigestMismatchError, Layout, Manifest
from weightplane.messages import Announce, Begin
from weightplane.p2p.shm import ShmReader, ShmTransport
from weightplane.sharer import SlotSharer
from weightplane.sharing import SharedVersions


@pytest.fixture
def sides():
    """A publisher's slots, a subscriber that shares them, and a state of three runs."""
    state = {name: torch.randn(1 << 20) for name in "abc"}
    layout = Layout.of(state)
    transport = ShmTransport(layout.size, 2)
    reader = ShmReader(replace(transport.offer, descriptors=()))
    sharer = SlotSharer(reader, layout, transport.offer, SharedVersions())
    yield state, layout, transport, reader, sharer
    reader.close()
    transport.close()


def write(transport, layout, state, names):
    views = layout.views(torch.frombuffer(transport.buffer(0), dtype=torch.uint8))
    for name in names:
        views[name].copy_(state[name])


def announce(layout, claim, state):
    manifest = Manifest.of(state)
    message = Announce(1, None, manifest.digest, 0.0, 0.0, 0, claim, manifest.pack(), None)
    return message, manifest


def test_what_is_final_is_digested_before_the_rest_is_written(sides):
    state, layout, transport, _, sharer = sides
    claim = transport.claim(0)
    sharer.follow(Begin(0, claim))
    assert sharer.following and not sharer.advance()
    write(transport, layout, state, "a")
    transport.advance(0, layout.shards[1].offset)
    assert sharer.advance() and not sharer.advance()
    write(transport, layout, state, "bc")
    transport.seal(0)
    while sharer.advance():
        pass
    assert not sharer.following
    shared, transfer = sharer.stage(*announce(layout, claim, state), lambda _: None)
    assert transfer.byte_count == layout.byte_count and transfer.copy_seconds == 0
    assert torch.equal(layout.views(shared.lease()[: layout.size])["b"], state["b"])


def test_bytes_that_change_after_they_were_called_final_are_looked_at_again(sides, caplog):
    state, layout, transport, _, sharer = sides
    claim = transport.claim(0)
    write(transport, layout, state, "abc")
    transport.buffer(0)[7] ^= 1
    transport.advance(0, layout.size)
    sharer.follow(Begin(0, claim))
    while sharer.advance():
        pass
    transport.buffer(0)[7] ^= 1
    transport.seal(0)
    shared, _ = sharer.stage(*announce(layout, claim, state), lambda _: None)
    assert "tensor 'a' is corrupt" in caplog.text
    shared.release()
    assert transport.claim(0) is not None


def test_a_slot_that_stays_wrong_is_refused_and_given_back(sides):
    state, layout, transport, _, sharer = sides
    claim = transport.claim(0)
    write(transport, layout, state, "abc")
    transport.buffer(0)[layout.shards[2].offset] ^= 1
    transport.seal(0)
    with pytest.raises(DigestMismatchError, match="tensor 'c'"):
        sharer.stage(*announce(layout, claim, state), lambda _: None)
    assert transport.claim(0) is not None


def test_a_slot_of_another_claim_or_one_being_written_cannot_be_kept(sides):
    _, _, transport, reader, _ = sides
    claim = transport.claim(0)
    assert reader.share(0, claim) is None
    transport.seal(0)
    assert reader.share(0, claim + 1) is None and reader.share(0, 0) is None
    kept = reader.share(0, claim)
    assert transport.claim(0) is None
    kept.release()
    kept.release()
    assert transport.claim(0) == claim + 1
    transport.disclaim(0)
    assert reader.share(0, claim + 1) is None


def test_a_private_copy_keeps_its_bytes_and_its_addresses(sides):
    state, layout, transport, _, sharer = sides
    claim = transport.claim(0)
    write(transport, layout, state, "abc")
    transport.seal(0)
    shared, _ = sharer.stage(*announce(layout, claim, state), lambda _: None)
    tensors = layout.views(shared.lease()[: layout.size])
    address = tensors["c"].data_ptr()
    assert transport.claim(0) is None
    sharer.vacate(0)
    assert transport.claim(0) is not None
    transport.buffer(0)[: layout.size] = bytes(layout.size)
    transport.seal(0)
    assert tensors["c"].data_ptr() == address
    assert all(torch.equal(tensors[name], state[name]) for name in "abc")
