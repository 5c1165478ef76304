"""Transports: how the bytes of a version get from a publisher's slot to a subscriber's buffer.

A transport moves bytes and nothing else. It knows no tensors, no versions and no digests: the
subscriber verifies what arrived, whichever way it came. A transport has two halves. The publisher's
half, a `Transport`, owns flat buffers called slots and an `Offer` that tells others how to reach
them. The subscriber's half, a `Reader`, is opened from the offer and copies ranges of a slot.

Contract of both halves:

- memory is acquired once, when a half is constructed; moving a version acquires nothing, so that a
  full disk or an exhausted table is met at start-up and not in the middle of a run;
- a slot is not written while a reader may read it (the publisher sees to that), and if it is
  nevertheless, the reader delivers torn bytes and the digests catch them: a reader never has to
  lock;
- `Reader.read` lets other Python threads run while it copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from weightplane.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Offer:
    """How to reach a publisher's slots.

    Attributes:
        transport: the name of the transport, for example ``"shm"``.
        slots: number of slots.
        slot_bytes: bytes of each slot.
        descriptors: file descriptors that travel with the offer; whoever receives them owns them.
    """

    transport: str
    slots: int
    slot_bytes: int
    descriptors: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.slots < 1 or self.slot_bytes < 1:
            raise InvalidArgumentError(
                f"an offer has {self.slots} slots of {self.slot_bytes} bytes; both must be positive"
            )


class Transport(Protocol):
    """The publisher's half."""

    @property
    def offer(self) -> Offer:
        """How to reach the slots; its descriptors stay this transport's."""
        ...

    def buffer(self, slot: int) -> memoryview:
        """The writable bytes of a slot, aligned to a page."""
        ...

    def close(self) -> None:
        """Release the slots; readers that still hold them keep the memory alive. Idempotent."""
        ...


class Reader(Protocol):
    """The subscriber's half."""

    def read(self, slot: int, offset: int, destination: memoryview) -> None:
        """Fill ``destination`` with the bytes of ``slot`` from ``offset`` on.

        Raises:
            WeightPlaneError: the bytes could not be had; ``destination`` holds nothing of use.
        """
        ...

    def close(self) -> None:
        """Let go of the slots. Idempotent."""
        ...
