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
- `Reader.read` lets other Python threads run while it copies, and ends: with the bytes, or with an
  error when the owner of the slot is dead or silent for the transport's ``stall_seconds``;
- memory is registered by the arena: a slot once by its owner, a staging buffer once by
  `Reader.register`, never a tensor at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from weightplane.errors import InvalidArgumentError
from weightplane.sharing import SharedVersion


@dataclass(frozen=True, slots=True)
class Offer:
    """How to reach a publisher's slots.

    Attributes:
        transport: the name of the transport, for example ``"shm"``.
        slots: number of slots.
        slot_bytes: bytes of each slot.
        descriptors: file descriptors that travel with the offer; whoever receives them owns them.
        endpoint: what the transport's readers need to find the slots, in its own encoding; never
            a pickle.
    """

    transport: str
    slots: int
    slot_bytes: int
    descriptors: tuple[int, ...] = ()
    endpoint: bytes = b""

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

    def seal(self, slot: int) -> None:
        """The slot is written: from now on readers get these bytes."""
        ...

    def close(self) -> None:
        """Release the slots; readers that still hold them keep the memory alive. Idempotent."""
        ...


class Reader(Protocol):
    """The subscriber's half."""

    def register(self, arena: memoryview) -> None:
        """Make ``arena``, a whole staging buffer, a place that `read` may write to.

        Called once for each buffer; the memory stays valid until `close`.
        """
        ...

    def read(self, slot: int, offset: int, destination: memoryview) -> None:
        """Fill ``destination`` with the bytes of ``slot`` from ``offset`` on.

        Args:
            slot: of the offer.
            offset: bytes from the start of the slot.
            destination: writable bytes inside a registered arena.

        Raises:
            WeightPlaneError: the bytes could not be had; ``destination`` holds nothing of use.
        """
        ...

    def close(self) -> None:
        """Let go of the slots. Idempotent."""
        ...


@runtime_checkable
class SharedTransport(Transport, Protocol):
    """A publisher's half whose slots readers can compute with where they lie."""

    def claim(self, slot: int) -> int | None:
        """Take a slot for writing; None while a reader keeps what lies in it.

        Returns:
            The number of the claim, from 1 on and never used twice.
        """
        ...

    def advance(self, slot: int, written: int) -> None:
        """Show readers that the first ``written`` bytes of a claimed slot are final."""
        ...

    def disclaim(self, slot: int) -> None:
        """Give up a claim: the slot holds nothing. `Transport.seal` ends a claim that succeeded."""
        ...

    def replace(self, slot: int) -> Offer:
        """Put fresh memory in the place of a slot that a reader keeps; the old is that reader's.

        Returns:
            An offer of this one slot; its descriptors stay this transport's.
        """
        ...


@runtime_checkable
class SharedReader(Reader, Protocol):
    """A subscriber's half that can keep slots."""

    def view(self, slot: int) -> memoryview:
        """The bytes of a slot where they lie; torn while they are written."""
        ...

    def written(self, slot: int, claim: int) -> int:
        """How many bytes of a slot are final for that claim; 0 if another claim has the slot."""
        ...

    def share(self, slot: int, claim: int) -> SharedVersion | None:
        """Keep a slot as it is, until nothing refers to it; None if it holds another claim's bytes
        or its owner may not be kept from it.
        """
        ...

    def renew(self, slot: int) -> None:
        """Look at a slot afresh: the present view has become somebody's own copy."""
        ...

    def replace(self, slot: int, offer: Offer) -> None:
        """The owner has put fresh memory in the place of a slot; ``offer`` is of it alone."""
        ...


def check_range(offer: Offer, slot: int, offset: int, length: int) -> None:
    """Raise `InvalidArgumentError` unless a slot of ``offer`` has these bytes."""
    if not 0 <= slot < offer.slots or offset < 0 or offset + length > offer.slot_bytes:
        raise InvalidArgumentError(
            f"bytes {offset} to {offset + length} of slot {slot} are asked for; "
            f"the offer has {offer.slots} slots of {offer.slot_bytes} bytes"
        )
