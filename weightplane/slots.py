"""The publisher's slots: which version lies in which, and which may be overwritten."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy
import torch
import xxhash

from weightplane.delta import encode_delta
from weightplane.digest import Manifest
from weightplane.errors import InvalidArgumentError
from weightplane.layout import Layout
from weightplane.messages import DeltaOffer
from weightplane.p2p import Offer, SharedTransport, Transport
from weightplane.p2p.shm import ShmTransport
from weightplane.transfer import write_state
from weightplane.version import Transfer, WeightVersion

DELTA_SHARE = 4
"""A delta is offered if it is at most one part in so many of the layout's bytes."""


def slot_bytes(layout: Layout, deltas: bool) -> int:
    """Bytes that a slot needs for a version of ``layout``, with or without room for a delta."""
    return layout.size + (layout.size // DELTA_SHARE if deltas else 0)


def open_transport(
    layout: Layout, transport: Transport | None, slots: int, deltas: bool | None
) -> tuple[Transport, bool]:
    """The transport of a publisher, shared memory unless one is given, and whether it has deltas.

    Raises:
        InvalidArgumentError: its slots are too short; it is closed.
        ShmSpaceError: shared memory is too small for the slots.
    """
    needed = slot_bytes(layout, bool(deltas))
    opened = transport or ShmTransport(needed, slots)
    offer = opened.offer
    if offer.slot_bytes < needed:
        opened.close()
        raise InvalidArgumentError(
            f"the transport has slots of {offer.slot_bytes} bytes; "
            f"{'deltas' if deltas else 'the layout'} need {needed}"
        )
    if deltas is None:
        room = offer.slots > 1 and offer.slot_bytes >= slot_bytes(layout, True)
        deltas = room and not isinstance(opened, SharedTransport)
    return opened, deltas


@dataclass(frozen=True, slots=True)
class Readable:
    """The newest version: what a subscriber that attaches now is told of."""

    version: WeightVersion
    manifest: Manifest
    slot: int
    claim: int = 0
    delta: DeltaOffer | None = None


@dataclass(slots=True)
class _Slot:
    """The memory of a slot, the version that lies in it, and whether it is being written."""

    view: memoryview
    tail: memoryview
    tensors: Mapping[str, torch.Tensor]
    number: int | None = None
    claim: int = 0
    writing: bool = False


class SlotTable:
    """Slots of one layout. Not thread-safe: the publisher's condition protects all but `write`.

    Args:
        layout: what lies in every slot.
        transport: owns the memory.
        deltas: whether `write` also writes deltas.
        threads: how many copy at a time.
    """

    def __init__(
        self, layout: Layout, transport: Transport, deltas: bool = False, threads: int = 1
    ) -> None:
        self._threads = threads
        self._helpers = ThreadPoolExecutor(max(1, threads - 1), "weightplane-copy")
        self._deltas = deltas
        self._layout = layout
        self._transport = transport
        self._shared = transport if isinstance(transport, SharedTransport) else None
        self._slots = [self._open(index) for index in range(transport.offer.slots)]
        self._newest: Readable | None = None

    def _open(self, index: int) -> _Slot:
        whole = self._transport.buffer(index)
        view, tail = whole[: self._layout.size], whole[self._layout.size :]
        tensors = self._layout.views(torch.frombuffer(view, dtype=torch.uint8))
        return _Slot(view, tail, tensors)

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def newest(self) -> Readable | None:
        """What late joiners start from."""
        return self._newest

    def claim(self, is_read: Callable[[int], bool]) -> int | None:
        """Mark a slot as being written and return its index; None if none is free.

        The newest version stays for late joiners, unless there is only one slot.

        Args:
            is_read: whether a subscriber may be reading a version.
        """
        for index, slot in enumerate(self._slots):
            if not self._is_free(index, is_read):
                continue
            if self._shared is not None:
                claim = self._shared.claim(index)
                if claim is None:
                    continue
                slot.claim = claim
            if self._newest is not None and self._newest.slot == index:
                self._newest = None
            slot.number, slot.writing = None, True
            return index
        return None

    def kept(self, is_read: Callable[[int], bool]) -> list[int]:
        """Slots that nothing but readers who keep them stands against, the oldest version first."""
        found = [index for index in range(len(self._slots)) if self._is_free(index, is_read)]
        return sorted(found, key=lambda index: self._slots[index].number or 0)

    def claim_number(self, index: int) -> int:
        """What a slot is stamped with; 0 where readers cannot keep slots."""
        return self._slots[index].claim

    def replace(self, index: int) -> Offer | None:
        """Put fresh memory in the place of a slot that a reader keeps; None if none can be kept."""
        if self._shared is None:
            return None
        # Before the transport unmaps the old memory, nothing here may refer to it.
        self._slots[index] = _Slot(memoryview(b""), memoryview(b""), {})
        offer = self._shared.replace(index)
        self._slots[index] = self._open(index)
        return offer

    def _is_free(self, index: int, is_read: Callable[[int], bool]) -> bool:
        slot = self._slots[index]
        newest = self._newest is not None and self._newest.slot == index
        if slot.writing or (newest and len(self._slots) > 1):
            return False
        return slot.number is None or not is_read(slot.number)

    def write(
        self, index: int, state: Mapping[str, torch.Tensor]
    ) -> tuple[Manifest, Transfer, DeltaOffer | None]:
        """Copy a checked state into a claimed slot; needs no lock, the claim keeps others away.

        If slots have room for one, the delta against the newest version is written behind it.
        """
        slot = self._slots[index]
        shared = self._shared
        advance = _ignore if shared is None else partial(shared.advance, index)
        manifest, transfer = write_state(
            self._layout, state, slot.view, slot.tensors, advance, self._helpers, self._threads
        )
        delta = self._write_delta(slot)
        self._transport.seal(index)
        return manifest, transfer, delta

    def _write_delta(self, slot: _Slot) -> DeltaOffer | None:
        # The newest version's slot is never claimed while there is another.
        newest = self._newest
        if newest is None or not self._deltas:
            return None
        base, new, target = (
            numpy.frombuffer(view, numpy.uint8)
            for view in (self._slots[newest.slot].view, slot.view, slot.tail)
        )
        length = encode_delta(base, new, target)
        if length is None:
            return None
        digest = xxhash.xxh3_128_digest(slot.tail[:length])
        return DeltaOffer(newest.manifest.digest, self._layout.size, length, digest)

    def release(self, index: int) -> None:
        """Give up a claim; the slot holds nothing."""
        if self._shared is not None:
            self._shared.disclaim(index)
        self._slots[index].writing = False

    def fill(self, readable: Readable) -> None:
        """A claimed slot now holds the newest version."""
        slot = self._slots[readable.slot]
        slot.number, slot.writing = readable.version.number, False
        self._newest = readable

    def close(self) -> None:
        """Let go of the memory, so that the transport can unmap it, and end the threads."""
        self._helpers.shutdown()
        self._slots.clear()
        self._newest = None


def _ignore(written: int) -> None:
    """Nobody reads a slot of this transport before it is sealed."""
