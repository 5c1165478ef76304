"""A replica that serves on what it has received, so that the trainer sends each byte once.

A relay is a subscriber and a publisher of the same layout in one process. What is staged and
verified here is published here, before anybody commits it: when all may commit is the
controller's decision, and staging far away should not wait for it. The manifest that the relay
computes over what it serves has to equal the one it was given.
"""

from __future__ import annotations

import select
import threading
import time
from types import TracebackType

from weightplane.channel import Channel
from weightplane.errors import DigestMismatchError, StalledError, WeightPlaneError
from weightplane.events import EventKind
from weightplane.layout import Layout
from weightplane.p2p import Transport
from weightplane.publisher import Publisher
from weightplane.subscriber import Subscriber
from weightplane.wakeup import Wakeup


class Relay:
    """Receives from one source and serves any number of subscribers.

    Args:
        channel: to the source.
        layout: what is relayed.
        name: how the source calls this relay.
        slots: versions that can be readable here at a time.
        transport: how bytes leave here; shared memory by default.

    Attributes:
        publisher: attach downstream channels to it.
        subscriber: the receiving half; an engine in the same process may commit from it.
    """

    def __init__(
        self,
        channel: Channel,
        layout: Layout,
        *,
        name: str = "relay",
        slots: int = 2,
        transport: Transport | None = None,
    ) -> None:
        self.publisher = Publisher(layout, slots, transport=transport)
        self.subscriber = Subscriber(channel, layout, name=name, retain=0)
        self._failure = ""
        self._stop = Wakeup()
        self._stopping = False
        self._served = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"weightplane-{name}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def failure(self) -> str:
        """Why nothing is relayed any more; empty while all is well."""
        return self._failure

    def reattach(self, channel: Channel) -> None:
        """Go on with another source; see `Subscriber.reattach`."""
        self.subscriber.reattach(channel)

    def wait_served(self, number: int, timeout: float) -> None:
        """Wait until version ``number``, or a newer one, can be read from here.

        Raises:
            StalledError: it cannot after ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        with self._served:
            while (newest := self.publisher.newest) is None or newest.number < number:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or self._failure:
                    raise StalledError(
                        f"weight version {number} is not relayed after {timeout:g} seconds; "
                        f"newest here: {newest and newest.number} {self._failure}"
                    )
                self._served.wait(remaining)

    def close(self, timeout: float = 5.0) -> None:
        """End both halves and the thread; idempotent.

        Raises:
            StalledError: a thread did not end within ``timeout`` seconds.
        """
        self._stopping = True
        self._stop.set()
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise StalledError(f"thread {self._thread.name} did not end in {timeout:g} seconds")
        self.subscriber.close(timeout)
        self.publisher.close(timeout)
        self._stop.close()

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self.subscriber, select.POLLIN)
        poller.register(self._stop, select.POLLIN)
        try:
            while not self._stopping:
                poller.poll()
                staged = [
                    event.number
                    for event in self.subscriber.events()
                    if event.kind is EventKind.STAGED
                ]
                if staged:
                    self._serve()
        except WeightPlaneError as error:
            with self._served:
                self._failure = str(error)
                self._served.notify_all()

    def _serve(self) -> None:
        """Publish the newest staged version from here."""
        version = self.subscriber.staged()
        newest = self.publisher.newest
        if version is None or (newest is not None and version.number <= newest.number):
            return
        # Committing here is only bookkeeping: it hands out the tensors and frees older buffers.
        swap = self.subscriber.commit(version.number)
        served = self.publisher.publish(swap.tensors, version.number)
        if served.manifest != version.manifest:
            raise DigestMismatchError(
                f"weight version {version.number} changed inside the relay: manifest "
                f"{served.manifest} instead of {version.manifest}"
            )
        with self._served:
            self._served.notify_all()
