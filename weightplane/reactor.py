"""One thread that waits on many channels."""

from __future__ import annotations

import selectors
import threading
from collections.abc import Callable

from weightplane.channel import Channel
from weightplane.errors import StalledError, WeightPlaneError
from weightplane.wakeup import Wakeup


class Reactor:
    """Calls ``on_ready(channel)`` whenever a channel can be read, and sends what waits to be sent.

    All methods but `close` are called under ``lock``, and so is ``on_ready``; the thread holds it
    only while it handles what has arrived, never while it waits.

    Args:
        name: the thread's name.
        lock: protects the channels and everything ``on_ready`` touches.
        on_ready: reads the channel; deals with its errors.
    """

    def __init__(
        self, name: str, lock: threading.Condition, on_ready: Callable[[Channel], None]
    ) -> None:
        self._lock = lock
        self._on_ready = on_ready
        self._selector = selectors.DefaultSelector()
        self._wakeup = Wakeup()
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._channels: set[Channel] = set()
        self._registered: dict[Channel, int] = {}
        self._failure: BaseException | None = None
        self._stopping = False
        self._released = False
        # A daemon, so that an owner that crashes before close() does not hang at exit.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, channel: Channel) -> None:
        """Watch a channel; the reactor closes it in the end."""
        self._channels.add(channel)
        self._wakeup.set()

    def remove(self, channel: Channel) -> None:
        """Stop watching a channel and close it."""
        self._channels.discard(channel)
        self._wakeup.set()

    def flush(self, channel: Channel) -> None:
        """Send what the channel has queued: now as far as the peer takes it, the rest later."""
        if not channel.flush():
            self._wakeup.set()

    def require_alive(self) -> None:
        """Raise `WeightPlaneError` if the thread died of an unforeseen exception."""
        if self._failure is not None:
            raise WeightPlaneError(
                f"the publisher's thread died: {self._failure!r}"
            ) from self._failure

    def close(self, timeout: float) -> None:
        """Close every channel and join the thread; idempotent.

        Raises:
            StalledError: the thread did not end within ``timeout`` seconds.
        """
        with self._lock:
            if self._released:
                return
            self._stopping = True
            self._channels.clear()
            self._wakeup.set()
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise StalledError(f"thread {self._thread.name} did not end in {timeout:g} seconds")
        with self._lock:
            self._released = True
            self._selector.close()
            self._wakeup.close()

    def _run(self) -> None:
        try:
            while self._reconcile():
                ready = self._selector.select()
                with self._lock:
                    for key, events in ready:
                        self._handle(key, events)
        except Exception as failure:
            # Kept for the owner: an exception in a thread reaches nobody otherwise.
            with self._lock:
                self._failure = failure
                self._lock.notify_all()
        finally:
            with self._lock:
                for channel in (*self._registered, *self._channels):
                    channel.close()

    def _reconcile(self) -> bool:
        """Make the selector watch what it should; returns whether to go on."""
        with self._lock:
            for channel in [known for known in self._registered if known not in self._channels]:
                channel.flush()
                self._selector.unregister(channel)
                del self._registered[channel]
                channel.close()
            for channel in self._channels:
                wanted = selectors.EVENT_READ
                if channel.wants_write:
                    wanted |= selectors.EVENT_WRITE
                known = self._registered.get(channel)
                if known is None:
                    self._selector.register(channel, wanted)
                elif known != wanted:
                    self._selector.modify(channel, wanted)
                self._registered[channel] = wanted
            return not self._stopping

    def _handle(self, key: selectors.SelectorKey, events: int) -> None:
        channel = key.fileobj
        if not isinstance(channel, Channel):
            self._wakeup.clear()
            return
        if channel not in self._channels:
            return
        if events & selectors.EVENT_WRITE:
            channel.flush()
        if events & selectors.EVENT_READ:
            self._on_ready(channel)
