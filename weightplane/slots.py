"""The publisher's slots: which version lies in which, and which may be overwritten."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy
import torch
import xxhash

from weightplane.delta import encode_delta
from weightplane.digest import Manifest
from weightplane.layout import Layout
from weightplane.messages import DeltaOffer
from weightplane.p2p import Transport
from weightplane.transfer import write_state
from weightplane.version import Transfer, WeightVersion

DELTA_SHARE = 4
"""A delta is offered if it is at most one part in so many of the layout's bytes."""


def slot_bytes(layout: Layout, deltas: bool) -> int:
    """Bytes that a slot needs for a version of ``layout``, with or without room for a delta."""
    return layout.size + (layout.size // DELTA_SHARE if deltas else 0)


@dataclass(frozen=True, slots=True)
class Readable:
    """The newest version: what a subscriber that attaches now is told of."""

    version: WeightVersion
    manifest: Manifest
    slot: int
    delta: DeltaOffer | None = None


@dataclass(slots=True)
class _Slot:
    """The memory of a slot, the version that lies in it, and whether it is being written."""

    view: memoryview
    tail: memoryview
    tensors: Mapping[str, torch.Tensor]
    number: int | None = None
    writing: bool = False


class SlotTable:
    """Slots of one layout. Not thread-safe: the publisher's condition protects all but `write`.

    Args:
        layout: what lies in every slot.
        transport: owns the memory.
        deltas: whether `write` also writes deltas.
    """

    def __init__(self, layout: Layout, transport: Transport, deltas: bool = False) -> None:
        self._deltas = deltas
        self._layout = layout
        self._transport = transport
        self._slots: list[_Slot] = []
        for index in range(transport.offer.slots):
            whole = transport.buffer(index)
            view, tail = whole[: layout.size], whole[layout.size :]
            tensors = layout.views(torch.frombuffer(view, dtype=torch.uint8))
            self._slots.append(_Slot(view, tail, tensors))
        self._newest: Readable | None = None

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
            newest = self._newest is not None and self._newest.slot == index
            if slot.writing or (newest and len(self._slots) > 1):
                continue
            if slot.number is not None and is_read(slot.number):
                continue
            slot.number, slot.writing = None, True
            if newest:
                self._newest = None
            return index
        return None

    def write(
        self, index: int, state: Mapping[str, torch.Tensor]
    ) -> tuple[Manifest, Transfer, DeltaOffer | None]:
        """Copy a checked state into a claimed slot; needs no lock, the claim keeps others away.

        If slots have room for one, the delta against the newest version is written behind it.
        """
        slot = self._slots[index]
        manifest, transfer = write_state(self._layout, state, slot.view, slot.tensors)
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
        self._slots[index].writing = False

    def fill(self, readable: Readable) -> None:
        """A claimed slot now holds the newest version."""
        slot = self._slots[readable.slot]
        slot.number, slot.writing = readable.version.number, False
        self._newest = readable

    def close(self) -> None:
        """Let go of the memory, so that the transport can unmap it."""
        self._slots.clear()
        self._newest = None
