"""An authenticated session over any byte stream: frames, codes and nonces, and no input or output.

Both sides prove that they know a shared secret before either believes a word, and every later
frame carries a code over its place in the sequence and its bytes. So a frame that is altered,
left out, repeated, moved, or recorded from another session is refused. The bytes are not hidden:
that is TLS's part.

::

    server -> client   challenge: server nonce
    client -> server   answer: client nonce, HMAC(secret, "client" + both nonces)
    server -> client   accepted: HMAC(secret, "server" + both nonces)
    either way         length, sequence, body, HMAC(key of the direction, sequence + length + body)

The keys of the directions are derived from the secret and both nonces. All codes are HMAC-SHA-256
(RFC 2104), compared in constant time. Before a peer is known, nothing of it longer than
`HANDSHAKE_BYTES` is kept.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import secrets
import struct
from typing import Literal, TypeVar

import msgspec

from weightplane.errors import ChannelError, InvalidArgumentError

WIRE_PROTOCOL = 1
"""Raised when the handshake or the frames change; the messages inside have their own number."""

MINIMUM_SECRET_BYTES = 16

HANDSHAKE_BYTES = 256
"""Longest frame before the peer has proved that it knows the secret."""

DEFAULT_MAX_FRAME_BYTES = 1 << 20

_LENGTH = struct.Struct("!I")
_FRAME = struct.Struct("!IQ")
_CODE_BYTES = hashlib.sha256().digest_size
_NONCE_BYTES = 32


class Side(enum.StrEnum):
    """Who listened, and who connected."""

    SERVER = "server"
    CLIENT = "client"


class _Handshake(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """Settings that the messages of the handshake share."""


class _Challenge(_Handshake, frozen=True, tag="challenge"):
    protocol: int
    nonce: bytes


class _Answer(_Handshake, frozen=True, tag="answer"):
    nonce: bytes
    code: bytes


class _Accepted(_Handshake, frozen=True, tag="accepted"):
    code: bytes


_encode = msgspec.msgpack.encode


def check_secret(secret: bytes) -> None:
    """Raise `InvalidArgumentError` unless ``secret`` is long enough to be one."""
    if not isinstance(secret, bytes) or len(secret) < MINIMUM_SECRET_BYTES:
        raise InvalidArgumentError(
            f"the shared secret has {len(secret)} bytes; use at least {MINIMUM_SECRET_BYTES} "
            "random ones, for example from secrets.token_bytes(32)"
        )


class Session:
    """One side of a session. Feed it what arrives; send what `take_output` returns.

    Args:
        side: server or client.
        secret: the same on both sides.
        max_frame_bytes: a longer body is refused, on sending and on receiving.
    """

    def __init__(
        self, side: Side, secret: bytes, max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES
    ) -> None:
        check_secret(secret)
        self._side = side
        self._secret = secret
        self._limit = max_frame_bytes
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._peer_nonce = b""
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._send_key = self._receive_key = b""
        self._sent = self._received = 0
        self._established = False
        self._refusal: str | None = None
        if side is Side.SERVER:
            self._say(_Challenge(WIRE_PROTOCOL, self._nonce))

    @property
    def established(self) -> bool:
        """Whether the peer has proved that it knows the secret."""
        return self._established

    @property
    def buffered(self) -> int:
        """Bytes that have arrived and are not a whole frame yet."""
        return len(self._incoming)

    def take_output(self) -> bytes:
        """Bytes of the handshake to send now."""
        output = bytes(self._outgoing)
        self._outgoing.clear()
        return output

    def seal(self, body: bytes) -> bytes:
        """The frame that carries ``body``.

        Raises:
            ChannelError: the session is not established, or the body is too long.
        """
        if not self._established:
            raise ChannelError("nothing may be sent before the peer is authenticated")
        if len(body) > self._limit:
            raise ChannelError(f"a frame of {len(body)} bytes; the limit is {self._limit}")
        header = _FRAME.pack(len(body), self._sent)
        self._sent += 1
        return b"".join((header, body, _code(self._send_key, header, body)))

    def feed(self, data: bytes) -> list[bytes]:
        """Take in bytes; returns the bodies that are complete and authentic, in order.

        Raises:
            ChannelError: the peer is refused, and why; every later call raises it again.
        """
        if self._refusal is not None:
            raise ChannelError(self._refusal)
        try:
            self._incoming += data
            bodies: list[bytes] = []
            while (body := self._next()) is not None:
                if self._established:
                    bodies.append(body)
                else:
                    self._shake(body)
            return bodies
        except ChannelError as error:
            self._refusal = str(error)
            self._incoming.clear()
            raise

    def _next(self) -> bytes | None:
        """The next whole frame's body; None while it is not complete."""
        incoming = self._incoming
        if not self._established:
            if len(incoming) < _LENGTH.size:
                return None
            (length,) = _LENGTH.unpack_from(incoming)
            if length > HANDSHAKE_BYTES:
                raise ChannelError(
                    f"a handshake of {length} bytes; the limit is {HANDSHAKE_BYTES}: "
                    "the peer does not speak this protocol"
                )
            end = _LENGTH.size + length
            if len(incoming) < end:
                return None
            body = bytes(incoming[_LENGTH.size : end])
            del incoming[:end]
            return body
        if len(incoming) < _FRAME.size:
            return None
        length, sequence = _FRAME.unpack_from(incoming)
        if length > self._limit:
            raise ChannelError(f"a frame of {length} bytes; the limit is {self._limit}")
        if sequence != self._received:
            raise ChannelError(
                f"frame {sequence} where frame {self._received} is due: repeated, reordered or lost"
            )
        end = _FRAME.size + length
        if len(incoming) < end + _CODE_BYTES:
            return None
        header, body = bytes(incoming[: _FRAME.size]), bytes(incoming[_FRAME.size : end])
        code = bytes(incoming[end : end + _CODE_BYTES])
        if not hmac.compare_digest(code, _code(self._receive_key, header, body)):
            raise ChannelError(f"frame {sequence} fails authentication: altered or forged")
        del incoming[: end + _CODE_BYTES]
        self._received += 1
        return body

    def _shake(self, body: bytes) -> None:
        """One step of the handshake."""
        if self._side is Side.SERVER:
            answer = _decode(body, _Answer)
            self._meet(answer.nonce)
            self._check(answer.code, "client")
            self._say(_Accepted(self._proof("server")))
            self._establish()
        elif not self._peer_nonce:
            challenge = _decode(body, _Challenge)
            if challenge.protocol != WIRE_PROTOCOL:
                raise ChannelError(
                    f"the peer's wire protocol is {challenge.protocol}, ours {WIRE_PROTOCOL}: "
                    "install the same release on both sides"
                )
            self._meet(challenge.nonce)
            self._say(_Answer(self._nonce, self._proof("client")))
        else:
            self._check(_decode(body, _Accepted).code, "server")
            self._establish()

    def _meet(self, nonce: bytes) -> None:
        if len(nonce) != _NONCE_BYTES:
            raise ChannelError(f"a nonce of {len(nonce)} bytes instead of {_NONCE_BYTES}")
        self._peer_nonce = nonce

    def _check(self, code: bytes, who: Literal["server", "client"]) -> None:
        if not hmac.compare_digest(code, self._proof(who)):
            raise ChannelError("the peer does not know the shared secret, or replays old messages")

    def _proof(self, who: str) -> bytes:
        pair = (self._nonce, self._peer_nonce)
        server, client = pair if self._side is Side.SERVER else pair[::-1]
        return _code(self._secret, b"lockstep " + who.encode(), server + client)

    def _establish(self) -> None:
        other = Side.CLIENT if self._side is Side.SERVER else Side.SERVER
        self._send_key = self._proof(f"{self._side} sends")
        self._receive_key = self._proof(f"{other} sends")
        self._established = True

    def _say(self, message: _Handshake) -> None:
        body = _encode(message)
        self._outgoing += _LENGTH.pack(len(body)) + body


def _code(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")


_Message = TypeVar("_Message", bound=_Handshake)


def _decode(body: bytes, kind: type[_Message]) -> _Message:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ChannelError(f"a malformed message in the handshake: {error}") from error
