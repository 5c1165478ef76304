"""The publisher's slots: which version lies in which, and which may be overwritten."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from weightplane.digest import Manifest
from weightplane.layout import Layout
from weightplane.p2p import Transport
from weightplane.transfer import write_state
from weightplane.version import Transfer, WeightVersion


@dataclass(frozen=True, slots=True)
class Readable:
    """The newest version: what a subscriber that attaches now is told of."""

    version: WeightVersion
    manifest: Manifest
    slot: int


@dataclass(slots=True)
class _Slot:
    """The memory of a slot, the version that lies in it, and whether it is being written."""

    view: memoryview
    tensors: Mapping[str, torch.Tensor]
    number: int | None = None
    writing: bool = False


class SlotTable:
    """Slots of one layout. Not thread-safe: the publisher's condition protects all but `write`.

    Args:
        layout: what lies in every slot.
        transport: owns the memory.
    """

    def __init__(self, layout: Layout, transport: Transport) -> None:
        self._layout = layout
        self._transport = transport
        self._slots: list[_Slot] = []
        for index in range(transport.offer.slots):
            view = transport.buffer(index)[: layout.size]
            tensors = layout.views(torch.frombuffer(view, dtype=torch.uint8))
            self._slots.append(_Slot(view, tensors))
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

    def write(self, index: int, state: Mapping[str, torch.Tensor]) -> tuple[Manifest, Transfer]:
        """Copy a checked state into a claimed slot; needs no lock, the claim keeps others away."""
        slot = self._slots[index]
        written = write_state(self._layout, state, slot.view, slot.tensors)
        self._transport.seal(index)
        return written

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
