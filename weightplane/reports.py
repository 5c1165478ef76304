"""What a publisher tells its owner about versions and subscribers."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from weightplane.version import Transfer, VersionRecord, VersionState, WeightVersion


class PeerState(enum.StrEnum):
    """Whether versions are announced to a subscriber."""

    CONNECTING = "connecting"
    READY = "ready"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """One subscriber as its publisher sees it.

    Attributes:
        subscriber: the name it gave itself.
        process: its process id; 0 if it never said hello.
        state: connecting, ready or gone.
        reason: why it is gone.
        staged: the newest version that it has staged and not committed, or None.
        active: the version that it serves, or None.
    """

    subscriber: str
    process: int
    state: PeerState
    reason: str
    staged: int | None
    active: int | None


@dataclass(frozen=True, slots=True)
class Delivery:
    """One version on its way to one subscriber."""

    subscriber: str
    process: int
    record: VersionRecord

    @property
    def pending(self) -> bool:
        """Whether the subscriber has not answered."""
        return self.record.state is VersionState.ANNOUNCED

    @property
    def failed(self) -> bool:
        """Whether the subscriber could not stage it, or died before it did."""
        return self.record.state is VersionState.ABORTED


@dataclass(frozen=True, slots=True)
class Publication:
    """One published version and what became of it.

    Times are `time.monotonic` seconds. ``publish_seconds`` is what `Publisher.publish` took,
    ``wait_seconds`` of it waiting for a free slot; in ``transfer``, ``verify_seconds`` is the time
    spent on digests.
    """

    version: WeightVersion
    announced_at: float
    publish_seconds: float
    wait_seconds: float
    transfer: Transfer
    deliveries: tuple[Delivery, ...] = ()

    @property
    def pending(self) -> tuple[Delivery, ...]:
        """Deliveries that connected subscribers have not answered."""
        return tuple(delivery for delivery in self.deliveries if delivery.pending)

    @property
    def failed(self) -> tuple[Delivery, ...]:
        """Deliveries that were aborted; each record's ``reason`` says why."""
        return tuple(delivery for delivery in self.deliveries if delivery.failed)

    @property
    def staged_everywhere(self) -> bool:
        """Whether it went to at least one subscriber and every one of them has it, verified."""
        return bool(self.deliveries) and not self.pending and not self.failed
