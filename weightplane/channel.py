"""Framed messages over a connected Unix socket.

A frame is 12 bytes of header (magic, number of descriptors, length) and a msgpack body of at most
``max_message_bytes``. File descriptors ride on the first byte of their frame.

Why an inherited socket pair needs no authentication: it has no name and no address, so nobody can
connect to it; the only way to own an end is to inherit it from, or be handed it by, a process that
already has it. Whoever could do that could as well read the memory of either process. A channel
that *listens* (a path, a port) has no such protection and must authenticate its peers.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from weightplane.errors import ChannelClosedError, ChannelError, InvalidArgumentError, StalledError
from weightplane.messages import Message

MAX_DESCRIPTORS = 16
"""Most file descriptors that one message may carry."""

DEFAULT_MAX_MESSAGE_BYTES = 64 << 20
"""A layout of a 1T-parameter mixture of experts is about 15 MB; nothing else is as large."""

_HEADER = struct.Struct("!4sB3xI")
_MAGIC = b"LSWP"
_READ_BYTES = 256 << 10
_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)


@dataclass(frozen=True, slots=True)
class Received:
    """One message and the descriptors that came with it, which the receiver now owns."""

    message: Any
    descriptors: tuple[int, ...] = ()


class Channel:
    """One end of a message channel. Never blocks unless asked to; not thread-safe.

    Args:
        connection: a connected ``AF_UNIX`` ``SOCK_STREAM`` socket; the channel owns it from now on.
        max_message_bytes: a longer message is refused, on sending and on receiving.
        message_type: what may arrive: a msgspec struct or a tagged union of them; anything else is
            refused. The weight plane's own messages by default.
        carries_descriptors: whether file descriptors reach the peer; False if the other end of the
            socket is a relay to somewhere else.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        message_type: Any = Message,
        carries_descriptors: bool = True,
    ) -> None:
        if connection.family != socket.AF_UNIX or connection.type != socket.SOCK_STREAM:
            raise InvalidArgumentError(
                f"a channel needs a connected AF_UNIX SOCK_STREAM socket, not {connection!r}"
            )
        connection.setblocking(False)
        self._socket = connection
        self._limit = max_message_bytes
        self.carries_descriptors = carries_descriptors
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(message_type)
        self._outgoing: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._incoming = bytearray()
        self._descriptors: deque[int] = deque()
        self._closed = False
        self._fault: ChannelError | None = None

    @classmethod
    def inherited(cls, descriptor: int) -> Channel:
        """The channel over a socket descriptor that this process inherited from its parent."""
        try:
            connection = socket.socket(fileno=descriptor)
        except OSError as error:
            raise InvalidArgumentError(
                f"descriptor {descriptor} is no socket ({error.strerror}); "
                "was it named in pass_fds when this process was started?"
            ) from error
        return cls(connection)

    def fileno(self) -> int:
        """The descriptor to wait on with `select`."""
        return self._socket.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether output waits for the peer to read."""
        return bool(self._outgoing)

    def queue(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        """Append a message to the output; `flush` sends it.

        Args:
            message: the message.
            descriptors: stay the caller's, and must stay open until the output is flushed.

        Raises:
            ChannelError: the message is longer than the limit or has too many descriptors.
        """
        body = self._encoder.encode(message)
        if len(body) > self._limit:
            raise ChannelError(
                f"a {type(message).__name__} message has {len(body)} bytes; "
                f"the limit of this channel is {self._limit}"
            )
        if descriptors and not self.carries_descriptors:
            raise ChannelError("this channel carries no file descriptors")
        if len(descriptors) > MAX_DESCRIPTORS:
            raise ChannelError(
                f"a message carries {len(descriptors)} descriptors; the limit is {MAX_DESCRIPTORS}"
            )
        header = _HEADER.pack(_MAGIC, len(descriptors), len(body))
        self._outgoing.append((memoryview(header + body), tuple(descriptors)))

    def flush(self) -> bool:
        """Send as much as the peer takes now; returns whether everything is sent.

        A dead peer is not reported here but by `read`: what it said before it died comes first.
        """
        while self._outgoing and not self._closed:
            data, descriptors = self._outgoing[0]
            ancillary = (
                [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
                if descriptors
                else []
            )
            try:
                sent = self._socket.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            except (BrokenPipeError, ConnectionResetError):
                self._outgoing.clear()
                break
            self._outgoing.popleft()
            if sent < len(data):
                self._outgoing.appendleft((data[sent:], ()))
        return True

    def read(self) -> list[Received]:
        """Every message that has arrived completely; empty if none has.

        Messages that arrived before a fault are returned first; the next call reports the fault.

        Raises:
            ChannelClosedError: the peer is gone and everything it said was read.
            ChannelError: what arrived is not a message of this protocol.
        """
        messages: list[Received] = []
        while self._fault is None and not self._closed:
            try:
                data, ancillary, flags, _ = self._socket.recvmsg(
                    _READ_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return messages
            except ConnectionResetError:
                data, ancillary, flags = b"", [], 0
            try:
                self._take_descriptors(ancillary, truncated=bool(flags & socket.MSG_CTRUNC))
                self._take_bytes(data, messages)
            except ChannelError as fault:
                self._fault = fault
        if self._fault is not None and not messages:
            raise self._fault
        return messages

    def send(self, message: Any, descriptors: Sequence[int] = (), timeout: float = 5.0) -> None:
        """Send one message and everything queued before it, waiting for the peer to read.

        Raises:
            StalledError: the peer did not read for ``timeout`` seconds.
        """
        self.queue(message, descriptors)
        deadline = time.monotonic() + timeout
        while not self.flush():
            if not self._wait(select.POLLOUT, deadline):
                raise StalledError(
                    f"the peer did not read a {type(message).__name__} for {timeout:g} seconds"
                )

    def receive(self, timeout: float) -> list[Received]:
        """Wait for at least one message.

        Raises:
            StalledError: nothing arrived for ``timeout`` seconds.
            ChannelClosedError: the peer is gone.
            ChannelError: what arrived is not a message of this protocol.
        """
        deadline = time.monotonic() + timeout
        while True:
            messages = self.read()
            if messages:
                return messages
            if not self._wait(select.POLLIN, deadline):
                raise StalledError(f"the peer said nothing for {timeout:g} seconds")

    def close(self) -> None:
        """Close the socket and every descriptor that nobody took; safe to call twice."""
        self._closed = True
        self._socket.close()
        self._outgoing.clear()
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _wait(self, event: int, deadline: float) -> bool:
        if self._closed:
            raise ChannelClosedError("the channel was closed here, by another thread")
        poller = select.poll()
        try:
            poller.register(self._socket, event)
        except ValueError as error:
            raise ChannelClosedError("this side closed the channel while it was waiting") from error
        return bool(poller.poll(max(0.0, deadline - time.monotonic()) * 1000))

    def _take_descriptors(
        self, ancillary: list[tuple[int, int, bytes]], *, truncated: bool
    ) -> None:
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(data[: len(data) - len(data) % received.itemsize])
                self._descriptors.extend(received)
        if truncated or len(self._descriptors) > MAX_DESCRIPTORS:
            raise ChannelError(
                f"the peer sent more than {MAX_DESCRIPTORS} descriptors, "
                "or this process may not open any more files (see ulimit -n)"
            )

    def _take_bytes(self, data: bytes, messages: list[Received]) -> None:
        """Append to ``messages`` every message that ``data`` completes."""
        if not data:
            middle = " in the middle of a message" if self._incoming else ""
            raise ChannelClosedError(f"the peer closed the channel{middle}")
        self._incoming += data
        while len(self._incoming) >= _HEADER.size:
            magic, count, length = _HEADER.unpack_from(self._incoming)
            if magic != _MAGIC:
                raise ChannelError(
                    f"the peer does not speak this protocol: a message starts with {magic!r}"
                )
            if length > self._limit:
                raise ChannelError(
                    f"the peer sends a message of {length} bytes; the limit is {self._limit}"
                )
            end = _HEADER.size + length
            if len(self._incoming) < end:
                return
            body = bytes(memoryview(self._incoming)[_HEADER.size : end])
            del self._incoming[:end]
            if count > len(self._descriptors):
                raise ChannelError(
                    f"a message names {count} descriptors, {len(self._descriptors)} arrived"
                )
            message = self._decode(body)
            taken = tuple(self._descriptors.popleft() for _ in range(count))
            messages.append(Received(message, taken))

    def _decode(self, body: bytes) -> Any:
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ChannelError(f"the peer sent a malformed message: {error}") from error


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """A connected socket pair: one end for this process, one to hand down through ``pass_fds``.

    The parent closes its copy of the handed-down end once the child runs; otherwise the end stays
    open and the death of the child goes unnoticed.
    """
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
