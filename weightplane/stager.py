"""The subscriber's thread: joins the publisher, and copies and verifies what it announces."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Mapping

from weightplane.channel import Channel, Received
from weightplane.digest import Manifest
from weightplane.errors import (
    ChannelClosedError,
    ChannelError,
    ClosedError,
    LayoutMismatchError,
    PublisherGoneError,
    StalledError,
    TransferError,
    WeightPlaneError,
)
from weightplane.fetch import fetch
from weightplane.layout import Layout
from weightplane.memory import BufferPool, StagingBuffer
from weightplane.messages import (
    PROTOCOL,
    Announce,
    Begin,
    Goodbye,
    Hello,
    Progress,
    Refused,
    Replaced,
    Vacate,
    Welcome,
)
from weightplane.p2p import Offer, Reader, SharedReader
from weightplane.partial import Partial
from weightplane.sharer import SlotSharer
from weightplane.sharing import SharedVersions
from weightplane.store import VersionStore
from weightplane.swap import Held
from weightplane.transfer import cut_into_runs
from weightplane.version import WeightVersion
from weightplane.wakeup import Wakeup
from weightplane.welcome import announced_manifest, check_slot, find_transport

PROGRESS_SECONDS = 0.25
"""How often a long staging tells the publisher that it moves."""

_FOLLOW_MILLISECONDS = 1
"""How often to look how far the publisher is with the slot that it writes."""


class Stager:
    """Runs the staging thread of one subscriber, from construction until `close`.

    Args:
        channel: to the publisher; owned from now on.
        layout: what is expected.
        store: where whole versions go, and where messages for the publisher come from.
        pool: where staging buffers come from.
        outbox_wakeup: set when the store has a message to send; owned from now on.
        name: how the publisher calls this subscriber.
        readers: how to open each transport.
        warm_buffers: how many buffers to have ready, so that staging pays no first touch.
        buffer_wait_seconds: how long a version waits for the owner to let go of old tensors.
        in_place: whether versions wait for `proceed` and take the place of what serves.
        shared: the versions kept in a publisher's slots; None to copy every version.
        partial: what the stager before this one had of a version when its source was lost.
    """

    def __init__(
        self,
        channel: Channel,
        layout: Layout,
        store: VersionStore,
        pool: BufferPool,
        outbox_wakeup: Wakeup,
        *,
        name: str,
        readers: Mapping[str, Callable[[Offer], Reader]],
        warm_buffers: int,
        buffer_wait_seconds: float,
        in_place: bool = False,
        shared: SharedVersions | None = None,
        partial: Partial | None = None,
    ) -> None:
        self._channel = channel
        self._layout = layout
        self._store = store
        self._pool = pool
        self._outbox_wakeup = outbox_wakeup
        self._name = name
        self._readers = readers
        self._warm_buffers = warm_buffers
        self._buffer_wait_seconds = buffer_wait_seconds
        self._runs = cut_into_runs(layout)
        self._in_place = in_place
        self._shared = shared
        self._sharer: SlotSharer | None = None
        self._waiting: Announce | None = None
        self._proceed = False
        self._partial = partial
        self._reader: Reader | None = None
        self._joined: Offer | None = None
        self._registered = 0
        self._progress_at = 0.0
        self._done = 0
        self._stop = threading.Event()
        # A daemon, so that an owner that crashes before close() does not hang at exit.
        self._thread = threading.Thread(target=self._run, name=f"weightplane-{name}", daemon=True)
        self._thread.start()

    def close(self, timeout: float) -> None:
        """Say goodbye and join the thread; idempotent.

        Raises:
            StalledError: the thread did not end within ``timeout`` seconds.
        """
        self._stop.set()
        self._outbox_wakeup.set()
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise StalledError(
                f"thread {self._thread.name} did not end in {timeout:g} seconds; "
                "it is copying from the publisher or waits for memory"
            )
        self._outbox_wakeup.close()

    def _run(self) -> None:
        try:
            if self._shared is None:
                # Before the hello: memory that cannot be had is reported before anything is
                # announced.
                self._pool.warm(1)
            self._channel.queue(Hello(PROTOCOL, self._name, os.getpid(), self._layout.to_json()))
            poller = select.poll()
            poller.register(self._outbox_wakeup, select.POLLIN)
            while not self._stop.is_set():
                self._send_outbox()
                events = select.POLLIN | (select.POLLOUT if self._channel.wants_write else 0)
                poller.register(self._channel, events)
                poller.poll(self._poll_milliseconds())
                self._outbox_wakeup.clear()
                for received in self._channel.read():
                    self._handle(received)
                self._take_in_place()
            self._send_outbox()
            self._channel.queue(Goodbye("the subscriber was closed"))
            self._channel.flush()
        except ChannelClosedError as error:
            self._store.lost(
                PublisherGoneError(f"the publisher is gone ({error}); what is active keeps serving")
            )
        except WeightPlaneError as error:
            self._store.lost(error)
        except Exception as error:
            # An exception in a thread reaches nobody otherwise; the owner meets this one in its
            # next wait, and the publisher sees the channel close.
            self._store.lost(WeightPlaneError(f"the staging thread died: {error!r}"))
        finally:
            self._channel.close()
            if self._reader is not None:
                self._reader.close()

    def _poll_milliseconds(self) -> int | None:
        """How long to sleep unless somebody speaks; follows the slot that is being written."""
        if self._sharer is None or not self._sharer.following:
            return None
        return 0 if self._sharer.advance() else _FOLLOW_MILLISECONDS

    def _send_outbox(self) -> None:
        for message in self._store.take_outbox():
            self._channel.queue(message)
        self._channel.flush()

    def _handle(self, received: Received) -> None:
        message = received.message
        match message:
            case Welcome() if self._reader is None:
                self._join(message, received.descriptors)
                return
            case Announce() if self._reader is not None and not received.descriptors:
                if self._in_place and self._store.active is not None:
                    self._offer(message)
                elif not self._stop.is_set():
                    self._stage(message, self._reader)
                    self._send_outbox()
                    self._warm(self._reader)
                return
            case Begin() if self._reader is not None and not received.descriptors:
                if self._sharer is not None:
                    self._sharer.follow(message)
                return
            case Vacate() if self._sharer is not None and not received.descriptors:
                self._sharer.vacate(message.slot)
                return
            case Replaced() if isinstance(self._reader, SharedReader):
                self._replace_slot(message, received.descriptors)
                return
        for descriptor in received.descriptors:
            os.close(descriptor)
        match message:
            case Refused(cause="layout"):
                raise LayoutMismatchError(
                    f"the publisher refuses this subscriber: {message.reason}"
                )
            case Refused():
                raise ChannelError(f"the publisher refuses this subscriber: {message.reason}")
            case Goodbye():
                raise PublisherGoneError(f"{message.reason}; what is active keeps serving")
            case _:
                raise ChannelError(
                    f"the publisher sent a {type(message).__name__} message out of turn"
                )

    def proceed(self) -> None:
        """The owner has paused: fetch the version that waits. From any thread."""
        self._proceed = True
        self._outbox_wakeup.set()

    def _offer(self, announce: Announce) -> None:
        """Let a version wait for the owner's pause; a newer one takes the place of an older."""
        version = WeightVersion(announce.number, announce.base, announce.manifest, announce.created)
        if not self._store.announce(version, announce.announced_at):
            return
        if self._waiting is not None:
            self._store.abort(
                self._waiting.number,
                f"weight version {announce.number} came before the owner paused for this one",
            )
        self._waiting = announce
        self._store.offered(announce.number)

    def _take_in_place(self) -> None:
        announce = self._waiting
        if self._proceed and announce is not None and self._reader is not None:
            self._proceed, self._waiting = False, None
            self._stage(announce, self._reader)
            self._send_outbox()

    def _join(self, welcome: Welcome, descriptors: tuple[int, ...]) -> None:
        try:
            open_reader = find_transport(welcome, self._layout, self._readers)
            offer = Offer(
                welcome.transport,
                welcome.slots,
                welcome.slot_bytes,
                descriptors,
                welcome.endpoint,
            )
        except WeightPlaneError:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        self._reader = open_reader(offer)
        self._joined = offer
        if self._shared is not None and isinstance(self._reader, SharedReader):
            self._sharer = SlotSharer(self._reader, self._layout, offer, self._shared)
        else:
            self._pool.warm(1)
        self._register_buffers(self._reader)
        self._store.connected()

    def _warm(self, reader: Reader) -> None:
        """Have the buffers of later versions ready, if versions are copied."""
        if self._sharer is None:
            self._pool.warm(self._warm_buffers)
            self._register_buffers(reader)

    def _replace_slot(self, message: Replaced, descriptors: tuple[int, ...]) -> None:
        check_slot(message.slot, self._joined)
        if self._sharer is None:
            raise ChannelError("the publisher replaces a slot, but this subscriber keeps none")
        self._sharer.replace(message.slot, descriptors, message.endpoint)

    def _share(self, announce: Announce, version: WeightVersion, manifest: Manifest) -> bool:
        """Show a version where it lies; whether that is possible."""
        if self._sharer is None or self._in_place:
            return False
        found = self._sharer.stage(announce, manifest, self._on_progress(announce.number))
        if found is None:
            return False
        shared, transfer = found
        self._store.make_room()
        self._send_outbox()
        tensors = self._layout.views(shared.lease()[: self._layout.size])
        self._store.put(Held(version, manifest, shared, tensors), transfer)
        return True

    def _stage(self, announce: Announce, reader: Reader) -> None:
        """Make the announced version whole here, or abort it and say why."""
        check_slot(announce.slot, self._joined)
        number = announce.number
        version = WeightVersion(number, announce.base, announce.manifest, announce.created)
        if not self._store.announce(version, announce.announced_at):
            return
        buffer: StagingBuffer | None = None
        self._done = verified = 0
        try:
            manifest = announced_manifest(announce, self._layout)
            if self._share(announce, version, manifest):
                return
            buffer, verified = self._resume(manifest)
            if buffer is None:
                buffer = self._obtain_buffer(number)
            self._register_buffers(reader)
            # Held on to while its bytes are read, so that its buffer is not reused.
            base = None if announce.delta is None else self._store.find(announce.delta.base)
            transfer = fetch(
                reader,
                announce,
                manifest,
                self._runs,
                buffer.bytes,
                None if base is None else base.buffer.bytes,
                self._on_progress(number),
                verified,
            )
            tensors = self._layout.views(buffer.lease())
            self._store.put(Held(version, manifest, buffer, tensors), transfer)
        except BaseException as error:
            if isinstance(error, TransferError) and buffer is not None:
                self._partial = Partial.of(
                    announce.manifest, buffer, self._runs, verified, self._done
                )
            elif buffer is not None:
                self._pool.give_back(buffer)
            self._store.abort(number, str(error) or repr(error))
            if not isinstance(error, WeightPlaneError):
                raise

    @property
    def partial(self) -> Partial | None:
        """What this stager had of a version when its source was lost; to be read after its end."""
        return self._partial

    def _resume(self, manifest: Manifest) -> tuple[StagingBuffer | None, int]:
        """The buffer and the verified bytes of an earlier attempt at the same weights."""
        partial, self._partial = self._partial, None
        if partial is None:
            return None, 0
        return partial.resume(manifest, self._layout)

    def _register_buffers(self, reader: Reader) -> None:
        """Register the buffers that were made since the last call; the pool never frees one."""
        for buffer in self._pool.buffers[self._registered :]:
            reader.register(buffer.bytes)
            self._registered += 1

    def _obtain_buffer(self, number: int) -> StagingBuffer:
        """A buffer that nothing refers to; waits for the owner to let go of one if it must."""
        if self._in_place:
            return self._pool.take_in_place()

        def make_room() -> None:
            self._store.make_room()
            # Also lets go of the versions that swaps have dropped since.
            self._send_outbox()

        return self._pool.obtain(number, make_room, self._stop, self._buffer_wait_seconds)

    def _on_progress(self, number: int) -> Callable[[int], None]:
        self._progress_at = time.monotonic()

        def report(byte_count: int) -> None:
            self._done = byte_count
            if self._stop.is_set():
                raise ClosedError("the subscriber was closed")
            now = time.monotonic()
            if now - self._progress_at >= PROGRESS_SECONDS:
                self._progress_at = now
                self._channel.queue(Progress(number, byte_count))
                self._channel.flush()

        return report
