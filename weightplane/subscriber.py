"""The rollout engine's side: stages versions beside the running engine and swaps them in.

A background thread copies every announced version into a private buffer, verifies each tensor of
the copy and only then shows it as *staged*. The owner, and nobody else, decides when to commit: it
calls `Subscriber.commit` at a token boundary, which moves pointers and copies nothing. Until then,
and whatever goes wrong before, the old version serves. The thread works without the interpreter
lock while it copies and digests, so token generation goes on beside it.

When versions arrive faster than the owner commits, up to ``stage_ahead`` of them stay staged; the
owner may commit any of them, and skips those before it. When yet another arrives, the oldest staged
one is retired unseen to make room.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from weightplane.channel import Channel
from weightplane.errors import InvalidArgumentError, LayoutError
from weightplane.events import Connection
from weightplane.holder import VersionHolder
from weightplane.layout import Layout
from weightplane.memory import BufferPool
from weightplane.p2p import Offer, Reader
from weightplane.p2p.readers import READERS
from weightplane.partial import Partial
from weightplane.sharing import SharedVersions
from weightplane.stager import Stager
from weightplane.store import VersionStore
from weightplane.swap import Swap
from weightplane.version import WeightVersion
from weightplane.wakeup import Wakeup


@dataclass(frozen=True, slots=True)
class SubscriberStatus:
    """A snapshot of a subscriber.

    Attributes:
        connection: whether new versions can arrive.
        reason: why they cannot.
        active: what serves.
        staged: what can be committed, oldest first.
        retained: what can be rolled back to, newest first.
        buffers: staging buffers that exist.
    """

    connection: Connection
    reason: str
    active: WeightVersion | None
    staged: tuple[WeightVersion, ...]
    retained: tuple[WeightVersion, ...]
    buffers: int


class Subscriber(VersionHolder):
    """Receives versions from one publisher. Construct, commit, roll back and close from one thread.

    Memory: over shared memory none, unless ``share`` is off: the engine computes with the
    publisher's slots, which every replica of the machine shares. Otherwise ``layout.size`` bytes
    for each of: the active version, ``retain`` previous ones and the one that is being staged; one
    more for each version beyond the first that is staged and uncommitted, up to ``stage_ahead``.
    Buffers are reused, never freed, and neither they nor slots are overwritten while any tensor
    over them is alive anywhere in the process.

    Args:
        channel: to the publisher; the subscriber owns it from now on.
        layout: what the engine expects; must equal the publisher's.
        retain: previous versions to keep in memory for `rollback`.
        stage_ahead: most versions that may be staged and uncommitted at a time.
        name: how the publisher's errors and reports call this subscriber.
        buffer_wait_seconds: how long a new version waits for the engine to let go of the tensors of
            retired versions before it is aborted.
        readers: how to open each transport.
        in_place: hold one buffer only, where memory is too short for two. The first version is
            staged as ever; later ones are *offered* and wait for `replace`. It costs the pause: the
            engine stands still for the whole transfer instead of for a move of pointers, nothing
            serves if the transfer fails, and there is no rollback. Needs ``retain=0``.
        share: compute with versions where the publisher wrote them, if the transport allows it
            (``shm`` does): nothing is copied, and a version is verified while it is written. What
            the engine writes into its weights stays its own. When the publisher runs out of slots,
            the oldest version here is copied, in place and in the background.

    Raises:
        LayoutError: the layout holds parts of tensors.
    """

    def __init__(
        self,
        channel: Channel,
        layout: Layout,
        *,
        retain: int = 1,
        stage_ahead: int = 2,
        name: str | None = None,
        buffer_wait_seconds: float = 30.0,
        readers: Mapping[str, Callable[[Offer], Reader]] = READERS,
        in_place: bool = False,
        share: bool = True,
    ) -> None:
        if not layout.is_whole:
            raise LayoutError("a subscriber needs a layout that holds every tensor whole, once")
        if retain < 0:
            raise InvalidArgumentError(f"retain is {retain}; use 0 or more")
        if stage_ahead < 1:
            raise InvalidArgumentError(f"stage_ahead is {stage_ahead}; use 1 or more")
        if in_place and retain:
            raise InvalidArgumentError(
                f"retain is {retain}: in_place keeps one buffer, so nothing can be retained; use 0"
            )
        super().__init__(layout, VersionStore(retain, stage_ahead))
        self._in_place = in_place
        self._pool = BufferPool(layout.size, limit=1 if in_place else 1 + retain + stage_ahead)
        self._name = f"process-{os.getpid()}" if name is None else name
        self._readers = readers
        self._shared = SharedVersions() if share and not in_place else None
        self._warm_buffers = 2 + retain
        self._buffer_wait_seconds = buffer_wait_seconds
        self._stager = self._start_stager(channel, None)

    def reattach(self, channel: Channel, timeout: float = 5.0) -> None:
        """Go on with another source, after the connection was lost or to leave a living one.

        What is active, staged and retained here stays. A version that the old source had begun is
        finished from the new one where it stopped, if both offer the same weights under its number.

        Raises:
            StalledError: the old staging thread did not end within ``timeout`` seconds.
            ClosedError: the subscriber is closed.
        """
        self._stager.close(timeout)
        self._store.reconnecting()
        self._stager = self._start_stager(channel, self._stager.partial)

    def _start_stager(self, channel: Channel, partial: Partial | None) -> Stager:
        outbox_wakeup = Wakeup()
        self._store.outbox_wakeup = outbox_wakeup
        return Stager(
            channel,
            self._layout,
            self._store,
            self._pool,
            outbox_wakeup,
            name=self._name,
            readers=self._readers,
            warm_buffers=self._warm_buffers,
            buffer_wait_seconds=self._buffer_wait_seconds,
            in_place=self._in_place,
            shared=self._shared,
            partial=partial,
        )

    def replace(self, number: int, timeout: float = 60.0) -> Swap:
        """Take an offered version in place of the one that serves; with ``in_place`` only.

        The owner has paused: from this call until it returns nothing may compute with the weights,
        whose bytes change under every tensor over them; their addresses stay. Caches are
        invalidated first.

        Raises:
            CommitRefusedError: a cache could not be invalidated. The old version goes on serving.
            VersionError: the version is not offered; or its transfer failed, and then *nothing is
                active*: generate only after a later `replace` or `commit` has succeeded.
            StalledError: the transfer took longer than ``timeout`` seconds; nothing is active.
        """
        if not self._in_place:
            raise InvalidArgumentError("replace() needs a subscriber with in_place=True")
        begun = time.monotonic()
        previous = self._store.release_active(number)
        self._stager.proceed()
        self._store.wait_ended(number, timeout)
        swap = self._store.commit(number)
        return replace(
            swap,
            previous=None if previous is None else previous.version,
            pause_seconds=time.monotonic() - begun,
            _previous_manifest=None if previous is None else previous.manifest,
        )

    def status(self) -> SubscriberStatus:
        """A snapshot of everything."""
        connection, reason = self._store.connection
        return SubscriberStatus(
            connection, reason, self.active, self._store.staged, self._store.retained,
            len(self._pool),
        )  # fmt: skip

    def close(self, timeout: float = 5.0) -> None:
        """Stop the thread and let go of every version; safe to call twice.

        Tensors that the engine still holds stay valid.

        Raises:
            StalledError: the thread did not end within ``timeout`` seconds.
        """
        self._stager.close(timeout)
        super().close(timeout)
