"""No wait for a subscriber is without an end."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from weightplane.errors import StalledError
from weightplane.peer import Peer


class Watchdog:
    """Waits for a publisher's subscribers as long as they make progress.

    It counts from the start of a wait or the last sign of progress, whichever is later: the owner
    may have kept the interpreter lock, and with it the thread that takes in progress, for long.

    Args:
        changed: the publisher's condition, notified on every change.
        stall_seconds: how long a subscriber may show no progress.
    """

    def __init__(self, changed: threading.Condition, stall_seconds: float) -> None:
        self._changed = changed
        self._stall_seconds = stall_seconds

    def wait(
        self, peers: Sequence[Peer], what: str, begun: float, timeout: float | None = None
    ) -> None:
        """Wait for one change; called under the condition.

        Args:
            peers: who is waited for.
            what: is the matter, for errors.
            begun: when the whole wait began, `time.monotonic`.
            timeout: seconds that the whole wait may take.

        Raises:
            StalledError: a peer makes no progress, or ``timeout`` passed; names who.
        """
        now = time.monotonic()
        stalls = [max(peer.progress_at, begun) + self._stall_seconds for peer in peers]
        for peer, stall in zip(peers, stalls, strict=True):
            if now > stall:
                raise StalledError(
                    f"{what}: {peer.describe_hold(now)}. Is that process stopped or overloaded? "
                    "detach() gives it up"
                )
        limits = [now + 1.0, *stalls]
        if timeout is not None:
            limits.append(begun + timeout)
            if now >= begun + timeout:
                holders = "; ".join(peer.describe_hold(now) for peer in peers)
                raise StalledError(f"{what} after {timeout:g} seconds: {holders}")
        self._changed.wait(max(0.001, min(limits) - now))
