"""What a publisher knows about one subscriber."""

from __future__ import annotations

import os
import time

from weightplane.channel import Channel, Received
from weightplane.errors import ChannelError, LayoutError, LayoutMismatchError
from weightplane.layout import Layout
from weightplane.messages import (
    PROTOCOL,
    Aborted,
    Announce,
    Begin,
    Committed,
    Goodbye,
    Hello,
    Message,
    Progress,
    Refused,
    Replaced,
    Retired,
    Staged,
    Vacate,
    Welcome,
)
from weightplane.p2p import Offer, Transport
from weightplane.reports import Delivery, PeerState, PeerStatus
from weightplane.version import (
    Transfer,
    VersionLedger,
    VersionRecord,
    VersionState,
    WeightVersion,
)


class Peer:
    """The state machine of one subscriber; the publisher's condition protects it."""

    def __init__(self, channel: Channel, layout: Layout, transport: Transport) -> None:
        self.channel = channel
        self.name = ""
        self.process = 0
        self.state = PeerState.CONNECTING
        self.reason = ""
        self.progress_at = time.monotonic()
        self._layout = layout
        self._transport = transport
        self._ledger = VersionLedger()

    @property
    def title(self) -> str:
        """How messages call this subscriber."""
        if not self.process:
            return "a subscriber that never said hello"
        return f"subscriber {self.name!r} (process {self.process})"

    @property
    def holding(self) -> tuple[VersionRecord, ...]:
        """The versions it was told of and has not answered."""
        return tuple(
            record
            for record in self._ledger.records()
            if record.state is VersionState.ANNOUNCED and self.state is PeerState.READY
        )

    def holds(self, number: int) -> bool:
        """Whether it may be reading version ``number``."""
        record = self._ledger.get(number)
        return (
            self.state is PeerState.READY
            and record is not None
            and record.state is VersionState.ANNOUNCED
        )

    def describe_hold(self, now: float) -> str:
        """For error messages: what it holds, since when, and when it last moved."""
        held = ", ".join(
            f"weight version {record.version.number} since {now - record.announced_at:.1f} s"
            for record in self.holding
        )
        idle = now - self.progress_at
        return f"{self.title} holds {held or 'nothing'}, last progress {idle:.1f} s ago"

    def announce(self, version: WeightVersion, message: Announce) -> None:
        """Queue the announcement of a version."""
        if not self.holding:
            self.progress_at = time.monotonic()
        self._ledger.announce(version, message.announced_at)
        self.channel.queue(message)

    def begin(self, slot: int, claim: int) -> None:
        """Queue that a slot is being written."""
        self.channel.queue(Begin(slot, claim))

    def vacate(self, slot: int) -> None:
        """Queue that a slot is needed."""
        self.channel.queue(Vacate(slot))

    def replace_slot(self, slot: int, offer: Offer) -> None:
        """Queue that a slot is other memory from now on; ``offer`` is of it alone."""
        self._queue(Replaced(slot, offer.endpoint), offer)

    def delivery(self, number: int) -> Delivery | None:
        """How version ``number`` fares here; None if it was never announced to this subscriber."""
        record = self._ledger.get(number)
        return None if record is None else Delivery(self.name, self.process, record)

    def status(self) -> PeerStatus:
        """A snapshot."""
        newest: dict[VersionState, int] = {}
        for record in self._ledger.records():
            newest[record.state] = record.version.number
        return PeerStatus(
            self.name,
            self.process,
            self.state,
            self.reason,
            staged=newest.get(VersionState.STAGED),
            active=newest.get(VersionState.COMMITTED),
        )

    def handle(self, received: Received) -> bool:
        """Take in one message; returns whether it made the subscriber ready.

        Raises:
            ChannelError: it may not say that, or not now.
            VersionError: it speaks of a version that is not in a state for it.
        """
        if received.descriptors:
            for descriptor in received.descriptors:
                os.close(descriptor)
            raise ChannelError(
                f"{self.title} sent file descriptors, which no message of its may have"
            )
        self.progress_at = time.monotonic()
        message = received.message
        if self.state is PeerState.CONNECTING and not isinstance(message, Goodbye):
            return self._join(message)
        match message:
            case Progress():
                pass
            case Staged():
                transfer = Transfer(
                    message.byte_count, message.copy_seconds, message.verify_seconds
                )
                self._ledger.stage(message.number, transfer, message.staged_at)
            case Aborted():
                self._ledger.abort(message.number, message.reason)
            case Committed():
                self._ledger.commit(message.number, message.pause_seconds, message.committed_at)
            case Retired():
                self._ledger.retire(message.number, message.reason)
            case Goodbye():
                self.leave(f"left: {message.reason}")
            case _:
                raise ChannelError(
                    f"{self.title} sent a {type(message).__name__} message out of turn"
                )
        return False

    def farewell(self, reason: str) -> None:
        """Tell the subscriber, if it can still hear, that this is on purpose."""
        self.channel.queue(Goodbye(reason))
        self.channel.flush()

    def leave(self, reason: str) -> None:
        """It is gone: whatever it had not answered is aborted. The first reason stays."""
        if self.state is PeerState.GONE:
            return
        for record in self.holding:
            self._ledger.abort(record.version.number, f"the subscriber is gone: {reason}")
        self.state = PeerState.GONE
        self.reason = reason

    def _queue(self, message: Message, offer: Offer) -> None:
        carried = offer.descriptors if self.channel.carries_descriptors else ()
        self.channel.queue(message, carried)

    def _join(self, message: Message) -> bool:
        if not isinstance(message, Hello):
            raise ChannelError(
                f"a subscriber's first message is {type(message).__name__}, not Hello"
            )
        self.name, self.process = message.subscriber, message.process
        refusal = self._refusal(message)
        if refusal is not None:
            self.channel.queue(refusal)
            self.channel.flush()
            self.leave(f"refused: {refusal.reason}")
            return False
        offer = self._transport.offer
        welcome = Welcome(
            protocol=PROTOCOL,
            layout=self._layout.digest,
            process=os.getpid(),
            transport=offer.transport,
            slots=offer.slots,
            slot_bytes=offer.slot_bytes,
            endpoint=offer.endpoint,
        )
        self._queue(welcome, offer)
        self.state = PeerState.READY
        return True

    def _refusal(self, hello: Hello) -> Refused | None:
        """Why the subscriber cannot join; None if it can."""
        if hello.protocol != PROTOCOL:
            reason = f"{self.title} speaks protocol {hello.protocol}, the publisher {PROTOCOL}"
            return Refused("protocol", f"{reason}: install the same release on both sides")
        try:
            self._layout.require_same(Layout.from_json(hello.layout), self.title)
        except (LayoutError, LayoutMismatchError) as error:
            return Refused("layout", str(error))
        return None
