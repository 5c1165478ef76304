"""Channels between machines and between unrelated processes: TCP or a Unix socket, authenticated.

A `Gateway` listens; `connect` reaches it. Whoever passes the handshake of `weightplane.session`
gets an ordinary `Channel`, which a `Publisher` or a `Subscriber` uses as if it were inherited; an
asyncio loop in a thread moves the bytes between it and the socket. Only control messages pass
here: weights move by a transport of `weightplane.p2p`.

The watchdog looks at progress, not at single calls: every authentic frame stamps the connection,
an idle one sends heartbeats, and one that was silent for ``stall_seconds`` is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from weightplane.channel import Channel, channel_pair
from weightplane.errors import ChannelError, InvalidArgumentError, StalledError
from weightplane.session import Session, Side
from weightplane.wire_settings import Address, WireSettings

_READ_BYTES = 128 << 10


class _Loop:
    """An asyncio loop in a thread of its own, until `end`."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        # A daemon, so that an owner that crashes before close() does not hang at exit.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def end(self) -> None:
        """Cancel every task and let the thread end; called in the loop."""
        self._ending.set()

    def close(self, timeout: float, before: Callable[[], None] | None = None) -> None:
        """Call ``before`` in the loop, `end` it and join the thread; idempotent."""
        # The loop has ended by itself, if this fails.
        with contextlib.suppress(RuntimeError):
            if before is not None:
                self.loop.call_soon_threadsafe(before)
            self.loop.call_soon_threadsafe(self.end)
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise StalledError(f"thread {self._thread.name} did not end in {timeout:g} seconds")

    def _run(self) -> None:
        try:
            self.loop.run_until_complete(self._ending.wait())
            self.loop.run_until_complete(self._wind_up())
        finally:
            self.loop.close()

    async def _wind_up(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Transports close their sockets in a later turn of the loop than the one that is told.
        await asyncio.sleep(0.01)


class _Relay:
    """Moves bytes between an authenticated stream and the inner end of a socket pair."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        side: Side,
        settings: WireSettings,
    ) -> None:
        self._reader, self._writer = reader, writer
        self._settings = settings
        self._session = Session(side, settings.secret, settings.max_frame_bytes)
        self._early: list[bytes] = []
        self._delivering = False
        self.progress_at = time.monotonic()

    async def authenticate(self) -> None:
        """Raises `ChannelError`, and says why, unless the peer proves that it knows the secret."""
        try:
            async with asyncio.timeout(self._settings.handshake_seconds):
                while True:
                    self._writer.write(self._session.take_output())
                    await self._writer.drain()
                    if self._session.established:
                        return
                    data = await self._reader.read(_READ_BYTES)
                    if not data:
                        raise ChannelError("the peer closed the connection during the handshake")
                    self._early += self._session.feed(data)
        except TimeoutError:
            raise ChannelError(
                f"the peer did not authenticate in {self._settings.handshake_seconds:g} seconds"
            ) from None
        except OSError as error:
            raise ChannelError(f"the connection broke during the handshake: {error}") from error

    async def run(self, inner: socket.socket) -> str:
        """Relay until either side ends; returns why it ended."""
        inner.setblocking(False)
        work = [self._outwards(inner), self._inwards(inner), self._watch()]
        tasks = [asyncio.ensure_future(item) for item in work]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        except ChannelError as error:
            return str(error)
        except OSError as error:
            return f"the connection broke: {error}"
        finally:
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                # Also if a second cancellation ends the wait.
                inner.close()
                await close_writer(self._writer)

    async def _outwards(self, inner: socket.socket) -> str:
        loop = asyncio.get_running_loop()
        chunk = min(_READ_BYTES, self._settings.max_frame_bytes)
        while data := await loop.sock_recv(inner, chunk):
            self._writer.write(self._session.seal(data))
            await self._writer.drain()
        return "closed here"

    async def _inwards(self, inner: socket.socket) -> str:
        loop = asyncio.get_running_loop()
        bodies, self._early = self._early, []
        while True:
            # While the owner here is slow to take what came, the peer's silence is not its fault.
            self._delivering = True
            for body in bodies:
                if body:
                    await loop.sock_sendall(inner, body)
            if bodies:
                self.progress_at = time.monotonic()
            self._delivering = False
            data = await self._reader.read(_READ_BYTES)
            if not data:
                return "the peer closed the connection"
            bodies = self._session.feed(data)

    async def _watch(self) -> str:
        while True:
            await asyncio.sleep(self._settings.heartbeat_seconds)
            silent = time.monotonic() - self.progress_at
            if silent > self._settings.stall_seconds and not self._delivering:
                return f"the peer gave no sign of life for {silent:.1f} seconds"
            self._writer.write(self._session.seal(b""))


async def close_writer(writer: asyncio.StreamWriter) -> None:
    """Close a stream whatever state its peer is in."""
    writer.close()
    try:
        with contextlib.suppress(OSError, ssl.SSLError, TimeoutError):
            async with asyncio.timeout(1.0):
                await writer.wait_closed()
    finally:
        writer.transport.abort()


class Gateway:
    """Listens, authenticates, and hands every peer that proves itself to ``on_channel``.

    Args:
        address: where to listen.
        settings: secret, TLS and limits.
        on_channel: called in the gateway's thread with the channel of each peer, for example
            `Publisher.attach`.

    Raises:
        InvalidArgumentError: the address is beyond loopback and there is no TLS.
        OSError: it cannot be listened on.
    """

    def __init__(
        self,
        address: Address,
        settings: WireSettings,
        on_channel: Callable[[Channel], None],
    ) -> None:
        if not (address.is_local or settings.certificate or settings.allow_plain_network):
            raise InvalidArgumentError(
                f"{address} is reachable from other machines and there is no TLS: set certificate "
                "and key, or allow_plain_network=True where the network is trusted"
            )
        self._settings = settings
        self._on_channel = on_channel
        self._refusals: Counter[str] = Counter()
        self._reasons: deque[str] = deque(maxlen=32)
        self._connections = 0
        self._path: str | None = None
        self._loop = _Loop("weightplane-gateway")
        try:
            self._server, self.address = self._loop.submit(self._listen(address)).result(30)
        except BaseException:
            self._loop.close(5.0)
            raise

    @property
    def connections(self) -> int:
        """Open connections, those that are still to authenticate included."""
        return self._connections

    @property
    def refused(self) -> int:
        """How many connections were refused."""
        return sum(self._refusals.values())

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the last refused or ended connections were, oldest first."""
        return tuple(self._reasons)

    def close(self, timeout: float = 5.0) -> None:
        """Stop listening and close every connection; idempotent."""
        self._loop.close(timeout, self._server.close)
        if self._path is not None:
            Path(self._path).unlink(missing_ok=True)

    async def _listen(self, address: Address) -> tuple[asyncio.Server, Address]:
        tls = self._settings.server_tls()
        if address.path is not None:
            server = await asyncio.start_unix_server(self._meet, address.path, ssl=tls)
            Path(address.path).chmod(0o600)
            self._path = address.path
            return server, address
        server = await asyncio.start_server(self._meet, address.host, address.port, ssl=tls)
        return server, Address(address.host, server.sockets[0].getsockname()[1])

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            relay = _Relay(reader, writer, Side.SERVER, self._settings)
            try:
                if self._connections > self._settings.max_connections:
                    raise ChannelError(
                        f"more than {self._settings.max_connections} connections at a time"
                    )
                await relay.authenticate()
            except ChannelError as error:
                self._refuse("refused", str(error))
                await close_writer(writer)
                return
            ours, inner = channel_pair()
            try:
                self._on_channel(Channel(ours, carries_descriptors=False))
            except Exception as error:
                ours.close()
                self._reasons.append(f"nobody takes the connection: {error!r}")
            self._reasons.append(await relay.run(inner))
        except asyncio.CancelledError:
            # Only `close` cancels; asyncio's streams would log it as an error.
            return
        finally:
            self._connections -= 1

    def _refuse(self, kind: str, reason: str) -> None:
        self._refusals[kind] += 1
        self._reasons.append(reason)


class Connection:
    """The connecting end: a channel and the thread that feeds it.

    Attributes:
        channel: for a `Subscriber`, which owns it.
    """

    def __init__(self, address: Address, settings: WireSettings, timeout: float) -> None:
        self._settings = settings
        self._reason = ""
        self._loop = _Loop("weightplane-connection")
        try:
            relay = self._loop.submit(self._connect(address, timeout)).result(timeout + 5.0)
        except BaseException:
            self._loop.close(5.0)
            raise
        ours, inner = channel_pair()
        self.channel = Channel(ours, carries_descriptors=False)
        # Once the task runs, cancelling it closes what it was given; before that, nothing would.
        started = threading.Event()
        self._loop.submit(self._run(relay, inner, started))
        started.wait()

    @property
    def reason(self) -> str:
        """Why the connection ended; empty while it stands."""
        return self._reason

    def close(self, timeout: float = 5.0) -> None:
        """Close the connection and join its thread; idempotent."""
        self._loop.close(timeout)

    async def _connect(self, address: Address, timeout: float) -> _Relay:
        tls = self._settings.client_tls()
        try:
            async with asyncio.timeout(timeout):
                if address.path is not None:
                    name = "localhost" if tls else None
                    streams = await asyncio.open_unix_connection(
                        address.path, ssl=tls, server_hostname=name
                    )
                else:
                    streams = await asyncio.open_connection(address.host, address.port, ssl=tls)
        except (OSError, TimeoutError) as error:
            raise ChannelError(f"{address} cannot be reached: {error!r}") from error
        relay = _Relay(*streams, Side.CLIENT, self._settings)
        try:
            await relay.authenticate()
        except ChannelError:
            await close_writer(streams[1])
            raise
        return relay

    async def _run(self, relay: _Relay, inner: socket.socket, started: threading.Event) -> None:
        started.set()
        self._reason = await relay.run(inner)
        self._loop.end()


def connect(address: Address, settings: WireSettings, timeout: float = 10.0) -> Connection:
    """Reach a gateway.

    Args:
        address: the gateway's.
        settings: with the gateway's secret.
        timeout: seconds for the connection itself; the handshake has its own limit.

    Raises:
        ChannelError: nobody listens there, or it does not know the secret, or refuses ours.
    """
    return Connection(address, settings, timeout)
