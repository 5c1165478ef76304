"""A plan executed by real processes: every endpoint pulls its chunks over a transport.

An endpoint has one registered arena, a slot of its transport, with the wire bytes of every chunk
that it holds, and in front of them one header per chunk: the version that lies there and a digest.
Receivers read the header until the version they want is there, then the chunk, straight into their
own slot, where they can serve it on. So nothing has to be pushed, announced or accepted, a relay
serves a chunk as soon as it has it, and whoever else holds a chunk can take the place of a sender
that is dead or silent: the wire bytes, and so the digest, are the same everywhere.

This moves bytes and verifies them. When a version may be written over or committed is decided by
whoever calls: `PlanEndpoint.receive` fills a staging arena and returns when it is whole.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy
import xxhash

from weightplane.errors import (
    DigestMismatchError,
    InvalidArgumentError,
    StalledError,
    TransferError,
    TransportUnavailableError,
    WeightPlaneError,
)
from weightplane.execute import pack, unpack
from weightplane.p2p import Offer, Reader, Transport
from weightplane.p2p.arena import Arena
from weightplane.p2p.readers import READERS, make_transport
from weightplane.plan import Plan
from weightplane.plan_part import ChunkWork

logger = logging.getLogger("weightplane")

_HEADER = struct.Struct("<q16s40x")
"""Version and xxh3_128 of a chunk, padded to a cache line."""

_EMPTY = -1
_POLL_SECONDS = 0.0005


@dataclass(frozen=True, slots=True)
class Received:
    """What receiving one version took.

    Attributes:
        byte_count: bytes of the chunks, each counted once.
        from_others: chunks that came from another endpoint than the plan's sender.
        read_again: chunks whose digest failed and that were read again.
        seconds: until everything was whole.
    """

    byte_count: int
    from_others: int
    read_again: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Place:
    """Bytes from the start of a slot: of a chunk's header and of the chunk, and its length."""

    header: int
    offset: int
    length: int


class PlanEndpoint:
    """One endpoint of a plan. Used by one thread.

    Args:
        plan: the same on every endpoint; compare the digests first.
        endpoint: which one this is.
        transport: its name.
        stall_seconds: a sender that shows no new chunk for this long is given up for another.
        make: how to make the transport's slot; for tests and settings.
    """

    def __init__(
        self,
        plan: Plan,
        endpoint: int,
        transport: str = "shm",
        *,
        stall_seconds: float = 5.0,
        make: Callable[[str, int, int], Transport] = make_transport,
    ) -> None:
        if stall_seconds <= 0:
            raise InvalidArgumentError(f"stall_seconds is {stall_seconds}; use a positive number")
        self._plan = plan
        self._endpoint = endpoint
        self._part = plan.part(endpoint)
        self._stall_seconds = stall_seconds
        self._places: dict[int, dict[int, _Place]] = {}
        self._readers: dict[int, Reader] = {}
        self._dead: set[int] = set()
        self._offers: Mapping[int, Offer] = {}
        mine = self._slot_places(endpoint)
        size = max([_HEADER.size, *(place.offset + place.length for place in mine.values())])
        self._transport = make(transport, size, 1)
        self._slot = self._transport.buffer(0)
        self._landing = Arena(4096)
        for place in mine.values():
            _HEADER.pack_into(self._slot, place.header, _EMPTY, bytes(16))

    @property
    def offer(self) -> Offer:
        """How others reach this endpoint; for `connect` on their side."""
        return self._transport.offer

    def connect(self, offers: Mapping[int, Offer]) -> None:
        """Learn how to reach the others; a connection is made when it is first needed."""
        self._offers = dict(offers)
        self._dead.clear()

    def publish(self, arena: numpy.ndarray, version: int) -> None:
        """Make a source's arena readable as ``version``.

        Nobody may be reading the version before: its bytes are written over.

        Args:
            arena: uint8 [arena_bytes].
            version: 0 or more.
        """
        for chunk in self._slot_places(self._endpoint):
            self._store(chunk, pack(arena, self._plan.reader(self._endpoint, chunk)), version)
        self._transport.seal(0)

    def receive(self, arena: numpy.ndarray, version: int) -> Received:
        """Fill a destination's staging arena with ``version``.

        Args:
            arena: uint8 [arena_bytes]; whole when this returns, of no use after an exception.
            version: 0 or more.

        Raises:
            StalledError: a chunk can be had from nobody; names it and who was asked.
        """
        begun = time.monotonic()
        from_others = read_again = byte_count = 0
        for offset, length in self._part.fills:
            arena[offset : offset + length] = 0
        for work in self._part.receives:
            sender, repeats = self._fetch(work, version)
            unpack(arena, work, self._chunk(work.chunk))
            self._transport.seal(0)
            from_others += sender != work.peer
            read_again += repeats
            byte_count += work.byte_count
        return Received(byte_count, from_others, read_again, time.monotonic() - begun)

    def close(self) -> None:
        """Close every connection and the slot; idempotent."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        self._slot.release()
        self._transport.close()

    # -- where chunks lie --------------------------------------------------------------------------

    def _slot_places(self, endpoint: int) -> dict[int, _Place]:
        """Where every chunk lies in an endpoint's slot: computed alike by everybody."""
        known = self._places.get(endpoint)
        if known is not None:
            return known
        plan = self._plan
        source = endpoint < plan.source.size
        holders = plan.source_holders if source else plan.destination_holders
        chunks = [chunk for chunk in range(len(plan.chunk_bytes)) if endpoint in holders(chunk)]
        offset = len(chunks) * _HEADER.size
        places: dict[int, _Place] = {}
        for index, chunk in enumerate(chunks):
            length = int(plan.chunk_bytes[chunk])
            places[chunk] = _Place(index * _HEADER.size, offset, length)
            offset += -(-length // 64) * 64
        self._places[endpoint] = places
        return places

    def _chunk(self, chunk: int) -> numpy.ndarray:
        place = self._slot_places(self._endpoint)[chunk]
        flat = numpy.frombuffer(self._slot, numpy.uint8)
        return flat[place.offset : place.offset + place.length]

    def _header(self, endpoint: int, chunk: int) -> int:
        return self._slot_places(endpoint)[chunk].header

    def _store(self, chunk: int, wire: numpy.ndarray, version: int) -> None:
        """Put a chunk into the slot; its header says nothing while the bytes change."""
        header = self._header(self._endpoint, chunk)
        _HEADER.pack_into(self._slot, header, _EMPTY, bytes(16))
        place = self._chunk(chunk)
        place[...] = wire
        _HEADER.pack_into(self._slot, header, version, xxhash.xxh3_128_digest(place.data))

    # -- fetching ----------------------------------------------------------------------------------

    def _fetch(self, work: ChunkWork, version: int) -> tuple[int, int]:
        """Get one chunk into the slot; returns who it came from and how often it was read again."""
        plan, chunk = self._plan, work.chunk
        asked: list[str] = []
        others = (*plan.destination_holders(chunk), *plan.source_holders(chunk))
        for sender in dict.fromkeys((work.peer, *others)):
            if sender in self._dead or sender == self._endpoint or sender not in self._offers:
                continue
            try:
                repeats = self._fetch_from(sender, chunk, version)
            except TransportUnavailableError:
                raise
            except WeightPlaneError as error:
                self._dead.add(sender)
                name = plan.endpoint_name(sender)
                asked.append(f"{name!r}: {error}")
                logger.warning("chunk %d cannot be had from %r: %s", chunk, name, error)
                continue
            return sender, repeats
        raise StalledError(
            f"chunk {chunk} of weight version {version} can be had from nobody "
            f"({'; '.join(asked) or 'everybody who holds it was given up before'})"
        )

    def _fetch_from(self, sender: int, chunk: int, version: int) -> int:
        reader = self._reader(sender)
        theirs = self._header(sender, chunk)
        offset = self._slot_places(sender)[chunk].offset
        header = self._header(self._endpoint, chunk)
        place = self._chunk(chunk)
        landing = self._landing.bytes[: _HEADER.size]
        _HEADER.pack_into(self._slot, header, _EMPTY, bytes(16))
        deadline = time.monotonic() + self._stall_seconds
        repeats = 0
        while True:
            reader.read(0, theirs, landing)
            there, digest = _HEADER.unpack(landing)
            if there > version:
                raise TransferError(f"weight version {there} has taken the place of {version}")
            if there == version:
                reader.read(0, offset, place.data)
                if xxhash.xxh3_128_digest(place.data) == digest:
                    _HEADER.pack_into(self._slot, header, version, digest)
                    return repeats
                repeats += 1
                logger.warning("chunk %d arrived corrupt or torn and is read again", chunk)
                if repeats > 2:
                    raise DigestMismatchError(f"chunk {chunk} never matches its digest")
            elif time.monotonic() > deadline:
                raise StalledError(f"no sign of the chunk in {self._stall_seconds:g} seconds")
            else:
                time.sleep(_POLL_SECONDS)

    def _reader(self, sender: int) -> Reader:
        reader = self._readers.get(sender)
        if reader is None:
            offer = self._offers[sender]
            reader = READERS[offer.transport](offer)
            reader.register(self._landing.bytes)
            reader.register(self._slot)
            self._readers[sender] = reader
        return reader
