"""The learner's side: makes versions readable and tells every subscriber.

`Publisher.publish` copies the state into a free slot and returns; the learner may change its
weights at once. A version stays readable in its slot until every subscriber it was announced to has
answered or died, and the newest one stays until a newer replaces it, so that a subscriber that
attaches late (or again, after a restart) has something to start from.

A background thread does all reading from the channels. It is asleep unless a subscriber speaks.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType

import torch

from weightplane.channel import Channel
from weightplane.errors import (
    ClosedError,
    InvalidArgumentError,
    LayoutError,
    StalledError,
    VersionError,
    WeightPlaneError,
)
from weightplane.layout import Layout
from weightplane.messages import Announce
from weightplane.p2p import Transport
from weightplane.peer import Peer
from weightplane.reactor import Reactor
from weightplane.reports import PeerState, PeerStatus, Publication
from weightplane.slots import Readable, SlotTable, open_transport
from weightplane.vacating import VACATE_POLL_SECONDS, Vacating
from weightplane.version import VersionLedger, WeightVersion, check_number
from weightplane.watchdog import Watchdog


class Publisher:
    """Publishes versions of one layout to any number of subscribers.

    Args:
        layout: what is published; every tensor whole.
        slots: versions that can be readable at a time, two at least to write one while another is
            read. Each costs ``layout.size`` bytes of shared memory, taken now. Subscribers on this
            machine compute with the slots themselves: one for what serves, one for what they can
            roll back to, one for what is staged, one that is being written. With fewer, or while
            replicas serve many different versions, a subscriber that is asked for its slot copies
            it in the background.
        stall_seconds: the watchdog. It counts from the start of the wait or the last sign of
            progress of whoever is waited for, whichever is later, so a slow subscriber that moves
            never trips it, however large the model.
        keep: how many publications `report` remembers.
        transport: how bytes move; shared memory by default. The publisher closes it. Slots may be
            longer than the layout: see ``deltas``.
        deltas: also offer each version as an exact delta against the one before, where that is less
            than a quarter of its bytes; subscribers that hold the base take the delta. By default
            wherever bytes cross a link and the transport's slots have room for one: slots of
            `slot_bytes` (layout, True), two at least. Not over shared memory, where finding the
            changes takes longer than a version does.
        threads: how many copy and digest a state at a time. One does not reach the speed of the
            memory on most machines.

    Raises:
        LayoutError: the layout holds parts of tensors.
        ShmSpaceError: shared memory is too small for the slots; nothing was left behind.
    """

    def __init__(
        self,
        layout: Layout,
        slots: int = 4,
        *,
        stall_seconds: float = 60.0,
        keep: int = 64,
        transport: Transport | None = None,
        deltas: bool | None = None,
        threads: int = 2,
    ) -> None:
        if not layout.is_whole:
            raise LayoutError("a publisher needs a layout that holds every tensor whole, once")
        if threads < 1:
            raise InvalidArgumentError(f"threads is {threads}; use 1 or more")
        if stall_seconds <= 0:
            raise InvalidArgumentError(f"stall_seconds is {stall_seconds}; use a positive number")
        self._layout = layout
        self._stall_seconds = stall_seconds
        self._keep = keep
        self._transport, deltas = open_transport(layout, transport, slots, deltas)
        self._slots = SlotTable(layout, self._transport, deltas, threads)
        self._ledger = VersionLedger(keep)
        self._publications: dict[int, Publication] = {}
        self._publishing = False
        self._closed = False
        self._peers: list[Peer] = []
        self._former: deque[Peer] = deque(maxlen=keep)
        # Everything above is read and written under this condition, which is notified on change.
        self._changed = threading.Condition()
        self._watchdog = Watchdog(self._changed, stall_seconds)
        self._reactor = Reactor("weightplane-publisher", self._changed, self._on_ready)

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def layout(self) -> Layout:
        """What is published."""
        return self._layout

    @property
    def newest(self) -> WeightVersion | None:
        """The version that a subscriber attaching now would be told of."""
        newest = self._slots.newest
        return None if newest is None else newest.version

    def attach(self, channel: Channel) -> None:
        """Serve the subscriber at the other end of ``channel``; returns at once.

        The newest version is announced to it as soon as it has said hello. The publisher owns the
        channel from now on.
        """
        with self._changed:
            self._require_open()
            self._peers.append(Peer(channel, self._layout, self._transport))
            self._reactor.add(channel)

    def publish(self, state: Mapping[str, torch.Tensor], number: int) -> WeightVersion:
        """Copy ``state`` and announce it as version ``number`` to every subscriber.

        The state is copied before this returns. Subscribers are waited for only when every slot is
        still being read.

        Args:
            state: exactly the tensors of the layout; any strides, any device.
            number: greater than every number before.

        Raises:
            LayoutError: tensors are missing, extra, or of another shape or dtype; nothing was sent.
            VersionError: the number does not grow; nothing was sent.
            StalledError: no slot became free and its readers make no progress; nothing was sent.
                The message names them; `detach` gives them up.
        """
        begun = time.monotonic()
        self._layout.check(state)
        checked = time.monotonic()
        index = self._claim_slot(number)
        waited = time.monotonic() - checked
        try:
            manifest, transfer, delta = self._slots.write(index, state)
        except BaseException:
            with self._changed:
                self._slots.release(index)
                self._publishing = False
            raise
        base = None if delta is None else delta.base
        version = WeightVersion(number, base, manifest.digest, time.time())
        with self._changed:
            self._publishing = False
            self._require_open()
            announced = time.monotonic()
            self._ledger.announce(version, announced)
            self._slots.fill(
                Readable(version, manifest, index, self._slots.claim_number(index), delta)
            )
            self._publications[number] = Publication(
                version, announced, announced - begun, waited, transfer
            )
            while len(self._publications) > self._keep:
                del self._publications[next(iter(self._publications))]
            for peer in self._peers:
                self._announce_newest(peer)
            self._changed.notify_all()
        return version

    def wait(self, number: int, timeout: float | None = None) -> Publication:
        """Wait until every subscriber that version ``number`` was announced to has answered or
        died.

        Args:
            number: a published version.
            timeout: seconds at most; by default only the watchdog limits the wait.

        Returns:
            The publication; look at ``staged_everywhere`` and ``failed``.

        Raises:
            StalledError: a subscriber makes no progress, or ``timeout`` passed; names who.
        """
        begun = time.monotonic()
        with self._changed:
            while True:
                self._require_open()
                publication = self._report(number)
                if not publication.pending:
                    return publication
                self._watchdog.wait(
                    [peer for peer in self._peers if peer.holds(number)],
                    f"weight version {number} is not staged everywhere",
                    begun,
                    timeout,
                )

    def wait_subscribers(self, count: int, timeout: float) -> tuple[PeerStatus, ...]:
        """Wait until ``count`` subscribers are connected and have the same layout.

        Raises:
            StalledError: fewer are there after ``timeout`` seconds; says what became of the others.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                self._require_open()
                ready = [peer for peer in self._peers if peer.state is PeerState.READY]
                if len(ready) >= count:
                    return tuple(peer.status() for peer in ready)
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    lost = "; ".join(f"{peer.title}: {peer.reason}" for peer in self._former)
                    raise StalledError(
                        f"{len(ready)} of {count} subscribers are ready after {timeout:g} seconds"
                        + (f" ({lost})" if lost else "")
                    )
                self._changed.wait(remaining)

    def report(self, number: int) -> Publication:
        """What became of version ``number`` so far, subscriber by subscriber.

        Raises:
            VersionError: it was never published, or so long ago that it is forgotten.
        """
        with self._changed:
            return self._report(number)

    def subscribers(self) -> tuple[PeerStatus, ...]:
        """Every subscriber, first those connected, then those that left, died or were refused."""
        with self._changed:
            return tuple(peer.status() for peer in (*self._peers, *self._former))

    def detach(self, subscriber: str, reason: str = "detached by the publisher's owner") -> None:
        """Give up the connected subscribers called ``subscriber``; their slots become free at once.

        One that still reads its slot finds torn bytes, by the digests, and aborts that version.

        Raises:
            InvalidArgumentError: no connected subscriber has that name.
        """
        with self._changed:
            found = [peer for peer in self._peers if peer.name == subscriber]
            if not found:
                raise InvalidArgumentError(f"no connected subscriber is called {subscriber!r}")
            for peer in found:
                peer.farewell(reason)
                self._drop(peer, reason)

    def close(self, timeout: float = 5.0) -> None:
        """Say goodbye, stop the thread and release the slots; safe to call twice.

        Subscribers keep serving what they have; one that is reading a slot can finish.

        Raises:
            StalledError: the thread did not end within ``timeout`` seconds.
        """
        with self._changed:
            already, self._closed = self._closed, True
            for peer in list(self._peers):
                peer.farewell("the publisher was closed")
                self._drop(peer, "the publisher was closed")
            self._changed.notify_all()
        self._reactor.close(timeout)
        if not already:
            self._slots.close()
            self._transport.close()

    # -- slots -------------------------------------------------------------------------------------

    def _claim_slot(self, number: int) -> int:
        """Wait for a slot that nobody reads and nobody may still ask for; mark it as written."""
        check_number(number)
        begun = time.monotonic()
        with self._changed:
            if self._publishing:
                raise WeightPlaneError("another publish() is running: publish from one thread")
            self._require_open()
            self._ledger.check_next(number)
            self._publishing = True
            try:
                index = self._slots.claim(self._is_read)
                vacating = Vacating(self._slots, self._stall_seconds)
                while index is None:
                    kept = self._slots.kept(self._is_read)
                    if kept:
                        ready = [peer for peer in self._peers if peer.state is PeerState.READY]
                        self._flush(vacating.ask(kept[0], ready))
                        self._changed.wait(VACATE_POLL_SECONDS)
                    else:
                        self._watchdog.wait(
                            [peer for peer in self._peers if peer.holding],
                            f"weight version {number} finds no free slot of {len(self._slots)}",
                            begun,
                        )
                    self._require_open()
                    index = self._slots.claim(self._is_read)
                claim = self._slots.claim_number(index)
                if claim:
                    ready = [peer for peer in self._peers if peer.state is PeerState.READY]
                    for peer in ready:
                        peer.begin(index, claim)
                    self._flush(ready)
                return index
            except BaseException:
                self._publishing = False
                raise

    def _flush(self, peers: Sequence[Peer]) -> None:
        for peer in peers:
            self._reactor.flush(peer.channel)

    def _is_read(self, number: int) -> bool:
        return any(peer.holds(number) for peer in self._peers)

    # -- subscribers -------------------------------------------------------------------------------

    def _announce_newest(self, peer: Peer) -> None:
        newest = self._slots.newest
        if newest is None or peer.state is not PeerState.READY:
            return
        publication = self._publications[newest.version.number]
        peer.announce(
            newest.version,
            Announce(
                number=newest.version.number,
                base=newest.version.base,
                manifest=newest.version.manifest,
                created=newest.version.created,
                announced_at=publication.announced_at,
                slot=newest.slot,
                claim=newest.claim,
                digests=newest.manifest.pack(),
                delta=newest.delta,
            ),
        )
        self._reactor.flush(peer.channel)

    def _on_ready(self, channel: Channel) -> None:
        """A channel can be read; called by the reactor's thread under the condition."""
        peer = next((peer for peer in self._peers if peer.channel is channel), None)
        if peer is None:
            return
        try:
            for received in channel.read():
                if peer.handle(received):
                    self._announce_newest(peer)
        except WeightPlaneError as error:
            self._drop(peer, str(error))
        if peer.state is PeerState.GONE:
            self._drop(peer, peer.reason)
        else:
            self._reactor.flush(channel)
        self._changed.notify_all()

    def _drop(self, peer: Peer, reason: str) -> None:
        """Forget a peer; whatever it had not answered is aborted, so its slots become free."""
        peer.leave(reason)
        if peer in self._peers:
            self._peers.remove(peer)
            self._former.append(peer)
            self._reactor.remove(peer.channel)
        self._changed.notify_all()

    def _report(self, number: int) -> Publication:
        publication = self._publications.get(number)
        if publication is None:
            raise VersionError(f"weight version {number} was never published, or is forgotten")
        found = (peer.delivery(number) for peer in (*self._former, *self._peers))
        deliveries = tuple(delivery for delivery in found if delivery is not None)
        return replace(publication, deliveries=deliveries)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the publisher is closed")
        self._reactor.require_alive()
