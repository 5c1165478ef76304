"""Where a control channel listens, and what both of its ends have to agree on."""

from __future__ import annotations

import ipaddress
import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from weightplane.errors import InvalidArgumentError
from weightplane.session import DEFAULT_MAX_FRAME_BYTES, check_secret


@dataclass(frozen=True, slots=True)
class Address:
    """Where a gateway listens: ``tcp://HOST:PORT`` or ``unix:///PATH``.

    Attributes:
        host: for TCP; the loopback interface by default.
        port: for TCP; 0 lets the system choose.
        path: for a Unix socket; None for TCP.
    """

    host: str = "127.0.0.1"
    port: int = 0
    path: str | None = None

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read an address.

        Raises:
            InvalidArgumentError: it is neither form.
        """
        parts = urlsplit(text)
        try:
            if parts.scheme == "unix" and parts.path:
                return cls("", 0, parts.path)
            if parts.scheme == "tcp" and parts.hostname:
                return cls(parts.hostname, parts.port or 0)
        except ValueError as error:
            raise InvalidArgumentError(f"address {text!r}: {error}") from error
        raise InvalidArgumentError(f"address {text!r}: use tcp://HOST:PORT or unix:///PATH")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        if self.path is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class WireSettings:
    """What both ends of a connection have to agree on, and their limits.

    Attributes:
        secret: shared by everybody who may connect; 16 bytes or more.
        certificate: of this gateway, PEM; turns TLS on for a gateway, together with ``key``.
        key: of the certificate, PEM.
        authority: PEM; turns TLS on for `connect`, which accepts certificates of this authority.
        allow_plain_network: listen beyond loopback without TLS: messages can be read, not altered.
        handshake_seconds: a peer that has not proved itself by then is dropped.
        heartbeat_seconds: an idle connection sends something this often.
        stall_seconds: a connection that has shown no sign of life for this long is closed.
        max_connections: more are refused.
        max_frame_bytes: a longer frame is refused.
    """

    secret: bytes = field(repr=False)
    certificate: Path | None = None
    key: Path | None = None
    authority: Path | None = None
    allow_plain_network: bool = False
    handshake_seconds: float = 5.0
    heartbeat_seconds: float = 5.0
    stall_seconds: float = 30.0
    max_connections: int = 1024
    max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES

    def __post_init__(self) -> None:
        check_secret(self.secret)
        if (self.certificate is None) != (self.key is None):
            raise InvalidArgumentError("certificate and key belong together: give both or neither")
        for name in ("handshake_seconds", "heartbeat_seconds", "stall_seconds", "max_connections"):
            if getattr(self, name) <= 0:
                raise InvalidArgumentError(
                    f"{name} is {getattr(self, name)}; use a positive number"
                )
        if self.stall_seconds <= self.heartbeat_seconds:
            raise InvalidArgumentError(
                f"stall_seconds is {self.stall_seconds}; it must be more than heartbeat_seconds, "
                f"{self.heartbeat_seconds}"
            )

    def server_tls(self) -> ssl.SSLContext | None:
        """The gateway's TLS context, or None."""
        if self.certificate is None or self.key is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(self.certificate, self.key)
        return context

    def client_tls(self) -> ssl.SSLContext | None:
        """The context of `connect`, or None."""
        if self.authority is None:
            return None
        context = ssl.create_default_context(cafile=str(self.authority))
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        return context


def secret_from_file(path: Path) -> bytes:
    """Read a shared secret; surrounding white space does not count.

    Raises:
        InvalidArgumentError: others than the owner may read the file, or it is too short.
    """
    mode = path.stat().st_mode
    if mode & 0o077:
        raise InvalidArgumentError(
            f"the secret {os.fspath(path)} can be read by others (mode {mode & 0o777:o}): chmod 600"
        )
    secret = path.read_bytes().strip()
    check_secret(secret)
    return secret
