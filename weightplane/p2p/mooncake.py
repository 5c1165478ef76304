"""One-sided reads through Mooncake's transfer engine (``mooncake-transfer-engine-non-cuda``).

Both halves start an engine that shakes hands peer to peer, so no metadata server is needed. On a
machine without RDMA the protocol is ``tcp``. The package needs the system library
``libibverbs.so.1`` (Debian: ``apt-get install libibverbs1``) even then.
"""

from __future__ import annotations

import importlib
from typing import Any

import msgspec

from weightplane.errors import ChannelError, TransferError, TransportUnavailableError
from weightplane.p2p import Offer, check_range
from weightplane.p2p.arena import Arena, RegisteredArenas

NAME = "mooncake"

LOOPBACK = "127.0.0.1"


class _Endpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The publisher's engine as ``host:port``, its protocol, and the address of each slot."""

    segment: str
    protocol: str
    addresses: tuple[int, ...]


def _engine(host: str, protocol: str) -> Any:
    try:
        module = importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise TransportUnavailableError(
            f"transport 'mooncake' cannot be loaded ({error}): pip install lockstep-rl[p2p], and "
            "the system library libibverbs1"
        ) from error
    engine = module.TransferEngine()
    code = engine.initialize(host, "P2PHANDSHAKE", protocol, "")
    if code:
        raise TransportUnavailableError(
            f"Mooncake's engine does not start on {host} with protocol {protocol!r} (code {code})"
        )
    return engine


class MooncakeTransport:
    """The publisher's half.

    Args:
        slot_bytes: bytes of each slot.
        slots: number of slots.
        host: the address that readers connect to; loopback by default.
        protocol: ``"tcp"`` or ``"rdma"``.

    Raises:
        TransportUnavailableError: Mooncake cannot run here.
    """

    def __init__(
        self, slot_bytes: int, slots: int = 2, host: str = LOOPBACK, protocol: str = "tcp"
    ) -> None:
        self._arenas = [Arena(slot_bytes) for _ in range(slots)]
        self._engine: Any = _engine(host, protocol)
        for arena in self._arenas:
            code = self._engine.register_memory(arena.address, slot_bytes)
            if code:
                raise TransportUnavailableError(
                    f"Mooncake does not register {slot_bytes} bytes (code {code})"
                )
        endpoint = _Endpoint(
            f"{host}:{self._engine.get_rpc_port()}",
            protocol,
            tuple(arena.address for arena in self._arenas),
        )
        self._offer = Offer(NAME, slots, slot_bytes, endpoint=msgspec.msgpack.encode(endpoint))
        self._closed = False

    @property
    def offer(self) -> Offer:
        """How to reach the slots."""
        return self._offer

    def buffer(self, slot: int) -> memoryview:
        """The writable bytes of a slot."""
        return self._arenas[slot].bytes

    def seal(self, slot: int) -> None:
        """Nothing to do: readers read the slot's own memory."""

    def close(self) -> None:
        """Deregister the slots and end the engine."""
        if not self._closed:
            self._closed = True
            for arena in self._arenas:
                self._engine.unregister_memory(arena.address)
            self._engine = None


class MooncakeReader:
    """The subscriber's half.

    Args:
        offer: the publisher's.
        host: this reader's address; loopback by default.

    Raises:
        TransportUnavailableError: Mooncake cannot run here.
    """

    def __init__(self, offer: Offer, host: str = LOOPBACK) -> None:
        try:
            endpoint = msgspec.msgpack.decode(offer.endpoint, type=_Endpoint)
        except msgspec.DecodeError as error:
            raise ChannelError(f"the endpoint of a Mooncake offer is malformed: {error}") from None
        if len(endpoint.addresses) != offer.slots:
            raise ChannelError(
                f"the publisher offers {offer.slots} slots and {len(endpoint.addresses)} addresses"
            )
        self._offer = offer
        self._endpoint = endpoint
        self._arenas = RegisteredArenas()
        self._registered: list[int] = []
        self._engine: Any = _engine(host, endpoint.protocol)

    def register(self, arena: memoryview) -> None:
        """Register a staging buffer with the engine, once."""
        address, length = self._arenas.add(arena)
        code = self._engine.register_memory(address, length)
        if code:
            raise TransferError(f"Mooncake does not register {length} bytes (code {code})")
        self._registered.append(address)

    def read(self, slot: int, offset: int, destination: memoryview) -> None:
        """Fill ``destination`` with the bytes of ``slot`` from ``offset`` on."""
        length = len(destination)
        check_range(self._offer, slot, offset, length)
        address = self._arenas.require(destination)
        if not length:
            return
        remote = self._endpoint.addresses[slot] + offset
        code = self._engine.transfer_sync_read(self._endpoint.segment, address, remote, length)
        if code:
            raise TransferError(
                f"Mooncake read of {length} bytes from {self._endpoint.segment} failed "
                f"(code {code}): the publisher is gone or refuses"
            )

    def close(self) -> None:
        """Deregister the buffers and end the engine."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        for address in self._registered:
            engine.unregister_memory(address)
        self._registered.clear()
