"""The versions one subscriber holds, and the swap between them.

Pure bookkeeping: no thread, no channel, no copying. The staging thread puts versions in, the owner
commits and rolls back; one lock, held for pointer moves only, protects both.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from weightplane.errors import (
    ClosedError,
    CommitRefusedError,
    StalledError,
    VersionError,
    WeightPlaneError,
)
from weightplane.events import Connection, EventKind, SubscriberEvent
from weightplane.messages import Aborted, Committed, Message, Retired, Staged
from weightplane.swap import DerivedCaches, Held, Invalidate, Swap
from weightplane.version import (
    Transfer,
    VersionLedger,
    VersionRecord,
    VersionState,
    WeightVersion,
)
from weightplane.wakeup import Wakeup


class VersionStore:
    """Staged, active and retained versions of one subscriber. Thread-safe.

    ``outbox_wakeup`` is set when a swap has put messages in the outbox; it changes with the thread
    that sends them.

    Args:
        retain: previous versions to keep for a rollback.
        stage_ahead: most versions that may be staged and uncommitted.
    """

    def __init__(self, retain: int, stage_ahead: int) -> None:
        self._retain = retain
        self._stage_ahead = stage_ahead
        self.outbox_wakeup: Wakeup | None = None
        self._ledger = VersionLedger()
        self._staged: dict[int, Held] = {}
        self._active: Held | None = None
        self._retained: deque[Held] = deque()
        self._dropped: list[Held] = []
        self._caches = DerivedCaches()
        self._swapping: WeightVersion | None = None
        self._connection = Connection.CONNECTING
        self._loss: WeightPlaneError | None = None
        self._outbox: deque[Message] = deque()
        self._events: deque[SubscriberEvent] = deque(maxlen=256)
        self._event_wakeup = Wakeup()
        # Protects everything above; notified on every event.
        self._changed = threading.Condition()

    # -- the owner's side --------------------------------------------------------------------------

    @property
    def active(self) -> Held | None:
        """What serves."""
        return self._active

    @property
    def connection(self) -> tuple[Connection, str]:
        """Whether new versions can arrive, and why not."""
        with self._changed:
            return self._connection, str(self._loss or "")

    @property
    def staged(self) -> tuple[WeightVersion, ...]:
        """What can be committed, oldest first."""
        with self._changed:
            return tuple(held.version for held in self._staged.values())

    @property
    def retained(self) -> tuple[WeightVersion, ...]:
        """What can be rolled back to, newest first."""
        with self._changed:
            return tuple(held.version for held in reversed(self._retained))

    @property
    def records(self) -> tuple[VersionRecord, ...]:
        """The lives of the versions that are remembered."""
        with self._changed:
            return self._ledger.records()

    @property
    def event_descriptor(self) -> int:
        """Readable while `take_events` has something to return."""
        return self._event_wakeup.fileno()

    def register_cache(self, name: str, invalidate: Invalidate) -> None:
        """Have ``invalidate`` called in every swap from now on."""
        with self._changed:
            self._caches.register(name, invalidate)

    def take_events(self) -> tuple[SubscriberEvent, ...]:
        """The events since the last call, oldest first."""
        with self._changed:
            events = tuple(self._events)
            self._events.clear()
            self._event_wakeup.clear()
            return events

    def wait_staged(self, timeout: float | None) -> WeightVersion:
        """Wait for a version that can be committed; returns the newest."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self._staged:
                self._require_open()
                if self._loss is not None:
                    raise self._loss
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    newest = self._ledger.records()[-1:]
                    known = "".join(
                        f"; weight version {record.version.number} is {record.state}"
                        + (f" ({record.reason})" if record.reason else "")
                        for record in newest
                    )
                    raise StalledError(
                        f"no weight version was staged in {timeout:g} seconds; "
                        f"the publisher is {self._connection}{known}"
                    )
                self._changed.wait(remaining)
            return self._newest_staged().version

    def commit(self, number: int) -> Swap:
        """Make staged version ``number`` the active one."""
        begun = time.monotonic()
        with self._changed:
            target = self._find_staged(number)
            self._begin_swap(target.version)
        invalidated = self._invalidate(target.version)
        with self._changed:
            previous = self._active
            self._active, self._swapping = target, None
            del self._staged[number]
            if previous is not None:
                self._retained.append(previous)
            while len(self._retained) > self._retain:
                self._retire(self._retained.popleft(), "superseded")
            for skipped in [held for held in self._staged.values() if held.version.number < number]:
                del self._staged[skipped.version.number]
                self._retire(skipped, f"skipped: weight version {number} was committed")
            now = time.monotonic()
            self._ledger.commit(number, now - begun, now)
            self._send(Committed(number, now, now - begun))
        # After the lock: the sender would only wake to wait for it.
        self._wake_sender()
        return Swap.between(target, previous, invalidated, now - begun)

    def release_active(self, number: int) -> Held | None:
        """Let go of what serves, so that offered version ``number`` can take its place in memory.

        Caches are invalidated first; if one cannot be, what serves goes on serving.
        """
        with self._changed:
            record = self._ledger.get(number)
            if record is None or record.state is not VersionState.ANNOUNCED:
                what = "was never offered" if record is None else f"is {record.state}"
                raise VersionError(f"weight version {number} {what} and cannot be taken in place")
            self._begin_swap(record.version)
            previous = self._active
        self._invalidate(record.version)
        with self._changed:
            self._active = self._swapping = None
            if previous is not None:
                self._retire(previous, f"weight version {number} takes its place in memory")
        return previous

    def wait_ended(self, number: int, timeout: float) -> None:
        """Wait until version ``number`` is staged.

        Raises:
            StalledError: it is not after ``timeout`` seconds.
            VersionError: it was aborted; says why.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                record = self._ledger.get(number)
                if record is not None and record.state is VersionState.STAGED:
                    return
                if record is None or record.state is VersionState.ABORTED or self._loss is not None:
                    reason = str(self._loss or "") if record is None else record.reason
                    raise VersionError(f"weight version {number} did not arrive: {reason}")
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise StalledError(
                        f"weight version {number} is not here in {timeout:g} seconds"
                    )
                self._changed.wait(remaining)

    def offered(self, number: int) -> None:
        """A version waits for the owner's pause."""
        with self._changed:
            self._emit(SubscriberEvent(EventKind.OFFERED, time.monotonic(), number))

    def rollback(self) -> Swap:
        """Make the newest retained version the active one again; the active one is retired."""
        begun = time.monotonic()
        with self._changed:
            if not self._retained:
                raise VersionError("there is no previous weight version to roll back to")
            target = self._retained[-1]
            self._begin_swap(target.version)
        invalidated = self._invalidate(target.version)
        with self._changed:
            previous = self._active
            self._active, self._swapping = self._retained.pop(), None
            if previous is not None:
                self._retire(previous, f"rolled back to weight version {target.version.number}")
            pause_seconds = time.monotonic() - begun
        self._wake_sender()
        return Swap.between(target, previous, invalidated, pause_seconds)

    # -- the staging thread's side -----------------------------------------------------------------

    def announce(self, version: WeightVersion, at: float) -> bool:
        """A publisher offers a version; returns whether it has to be fetched.

        One that is held here already, because another source delivered it, is reported as staged.
        """
        with self._changed:
            record = self._ledger.reannounce(version, at)
            if record.state is VersionState.ANNOUNCED:
                return True
            now = time.monotonic()
            self._send(Staged(version.number, now, 0, 0.0, 0.0))
            if record.state is VersionState.COMMITTED:
                self._send(Committed(version.number, now, record.pause_seconds or 0.0))
            return False

    def find(self, manifest: str) -> Held | None:
        """The version with that manifest digest, if it is held here in any state."""
        with self._changed:
            candidates = [*self._staged.values(), *self._retained]
            if self._active is not None:
                candidates.append(self._active)
            return next((held for held in candidates if held.manifest.digest == manifest), None)

    def reconnecting(self) -> None:
        """A new source takes the place of the one that was lost."""
        with self._changed:
            self._require_open()
            self._connection, self._loss = Connection.CONNECTING, None
            self._outbox.clear()

    def make_room(self) -> None:
        """Retire the oldest staged version if another one would be too many."""
        with self._changed:
            candidates = [
                held for held in self._staged.values() if held.version is not self._swapping
            ]
            if candidates and len(self._staged) >= self._stage_ahead:
                oldest = candidates[0]
                del self._staged[oldest.version.number]
                self._retire(oldest, "retired unseen: newer weight versions needed its buffer")

    def put(self, held: Held, transfer: Transfer) -> None:
        """A version is whole and verified: the owner may commit it."""
        with self._changed:
            now = time.monotonic()
            number = held.version.number
            self._ledger.stage(number, transfer, now)
            self._staged[number] = held
            self._send(
                Staged(
                    number,
                    now,
                    transfer.byte_count,
                    transfer.copy_seconds,
                    transfer.verify_seconds,
                )
            )
            self._emit(SubscriberEvent(EventKind.STAGED, now, number))

    def abort(self, number: int, reason: str) -> None:
        """A version did not become whole here."""
        with self._changed:
            self._ledger.abort(number, reason)
            self._send(Aborted(number, reason))
            self._emit(SubscriberEvent(EventKind.ABORTED, time.monotonic(), number, reason))

    def connected(self) -> None:
        """The publisher let this subscriber in."""
        with self._changed:
            if self._connection is Connection.CONNECTING:
                self._connection = Connection.CONNECTED
                self._emit(SubscriberEvent(EventKind.CONNECTED, time.monotonic()))

    def lost(self, error: WeightPlaneError) -> None:
        """No further version can arrive; ``error`` says why."""
        with self._changed:
            if self._connection in (Connection.CONNECTING, Connection.CONNECTED):
                self._connection, self._loss = Connection.LOST, error
                self._outbox.clear()
                self._dropped.clear()
                self._emit(SubscriberEvent(EventKind.LOST, time.monotonic(), None, str(error)))

    def take_outbox(self) -> list[Message]:
        """Messages for the publisher, oldest first; also frees what swaps have dropped."""
        with self._changed:
            messages = list(self._outbox)
            self._outbox.clear()
            dropped, self._dropped = self._dropped, []
        dropped.clear()
        return messages

    def close(self) -> None:
        """Let go of every version; tensors that the owner still holds stay valid."""
        with self._changed:
            if self._connection is Connection.CLOSED:
                return
            self._connection = Connection.CLOSED
            self._staged.clear()
            self._retained.clear()
            self._dropped.clear()
            self._active = None
            self._outbox.clear()
            self._event_wakeup.close()
            self._changed.notify_all()

    # -- inside ------------------------------------------------------------------------------------

    def _find_staged(self, number: int) -> Held:
        held = self._staged.get(number)
        if held is not None:
            return held
        record = self._ledger.get(number)
        if record is None:
            what = "was never announced here, or ended long ago"
        else:
            what = f"is {record.state}" + (f" ({record.reason})" if record.reason else "")
        staged = ", ".join(map(str, self._staged)) or "none"
        raise VersionError(f"weight version {number} {what}; staged versions: {staged}")

    def _newest_staged(self) -> Held:
        return self._staged[max(self._staged)]

    def _begin_swap(self, target: WeightVersion) -> None:
        self._require_open()
        if self._swapping is not None:
            raise CommitRefusedError(
                f"a swap to weight version {self._swapping.number} is running; "
                "an invalidation must not commit or roll back"
            )
        self._swapping = target

    def _invalidate(self, target: WeightVersion) -> tuple[str, ...]:
        """Invalidate every cache for the swap to ``target`` that has begun, or call it off."""
        try:
            return self._caches.invalidate(
                target, None if self._active is None else self._active.version
            )
        except BaseException:
            with self._changed:
                self._swapping = None
            raise

    def _wake_sender(self) -> None:
        if self.outbox_wakeup is not None:
            self.outbox_wakeup.set()

    def _retire(self, held: Held, reason: str) -> None:
        self._ledger.retire(held.version.number, reason)
        held.buffer.give_back()
        self._send(Retired(held.version.number, reason))
        if self._connection is Connection.CONNECTED:
            # Freeing hundreds of tensors takes longer than the rest of a swap: the staging thread
            # does it.
            self._dropped.append(held)

    def _send(self, message: Message) -> None:
        if self._connection in (Connection.CONNECTING, Connection.CONNECTED):
            self._outbox.append(message)

    def _emit(self, event: SubscriberEvent) -> None:
        if self._connection is not Connection.CLOSED:
            self._events.append(event)
            self._event_wakeup.set()
            self._changed.notify_all()

    def _require_open(self) -> None:
        if self._connection is Connection.CLOSED:
            raise ClosedError("the subscriber is closed")
