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
from dataclasses import dataclass, replace

import numpy
import xxhash

from weightplane.errors import (
    ClosedError,
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

_HEADER = struct.Struct("<q16sq32x")
"""Of a chunk: the version that lies there, its xxh3_128, and the version that is wanted there if
it is another; padded to a cache line."""

_EMPTY = -1
_POLL_SECONDS = 0.0005


class SupersededError(TransferError):
    """A source has gone on to a newer version before this one was received."""


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
            _HEADER.pack_into(self._slot, place.header, _EMPTY, bytes(16), _EMPTY)

    @property
    def offer(self) -> Offer:
        """How others reach this endpoint; for `connect` on their side.

        It holds no descriptors, which would be closed by whoever opens it first: shared memory is
        opened by its endpoint, for which a process must be on this machine and of this user.
        """
        return replace(self._transport.offer, descriptors=())

    def connect(self, offers: Mapping[int, Offer]) -> None:
        """Learn how to reach the others; a connection is made when it is first needed.

        Call it again with everybody's offers when somebody was restarted, or is to be tried again
        after it was given up.
        """
        for peer, offer in self._offers.items():
            if offers.get(peer) != offer and peer in self._readers:
                self._readers.pop(peer).close()
        self._offers = dict(offers)
        self._dead.clear()

    def newest(self) -> int | None:
        """The version that this destination's sources hold by now; None if there is none yet.

        It looks at the first chunk alone; `receive` waits for the others.
        """
        for work in self._part.receives[:1]:
            for sender in self._senders(work):
                try:
                    version, _, _ = self._read_header(sender, work.chunk)
                except TransportUnavailableError:
                    raise
                except WeightPlaneError as error:
                    self._give_up(sender, work.chunk, error)
                    continue
                return None if version == _EMPTY else version
        return None

    def behind(self, version: int) -> tuple[str, ...]:
        """Names of the endpoints that get chunks from here and lack some of ``version`` still,
        unless they have gone on to a newer one.

        Their last chunk from here is looked at: they fetch in the order of the plan.
        """
        last = {work.peer: work.chunk for work in self._part.sends}
        found: list[str] = []
        for peer, chunk in last.items():
            if peer in self._dead or peer not in self._offers:
                continue
            try:
                there, _, wanted = self._read_header(peer, chunk)
            except TransportUnavailableError:
                raise
            except WeightPlaneError as error:
                self._give_up(peer, chunk, error)
                continue
            if there < version and wanted <= version:
                found.append(self._plan.endpoint_name(peer))
        return tuple(found)

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

    def receive(
        self,
        arena: numpy.ndarray,
        version: int,
        check: Callable[[], None] = lambda: None,
    ) -> Received:
        """Fill a destination's staging arena with ``version``.

        Args:
            arena: uint8 [arena_bytes]; whole when this returns, of no use after an exception.
            version: 0 or more.
            check: called while waiting; may raise to stop.

        Raises:
            StalledError: a chunk can be had from nobody; names it and who was asked.
            SupersededError: a source holds a newer version by now.
        """
        begun = time.monotonic()
        from_others = read_again = byte_count = 0
        for offset, length in self._part.fills:
            arena[offset : offset + length] = 0
        for work in self._part.receives:
            sender, repeats = self._fetch(work, version, check)
            unpack(arena, work, self._chunk(work.chunk))
            self._transport.seal(0)
            from_others += sender != work.peer
            read_again += repeats
            byte_count += work.byte_count
        return Received(byte_count, from_others, read_again, time.monotonic() - begun)

    def skip(self, version: int) -> None:
        """Show those who serve this endpoint that it gave ``version`` up."""
        for place in self._slot_places(self._endpoint).values():
            there, digest, _ = _HEADER.unpack_from(self._slot, place.header)
            if there < version:
                _HEADER.pack_into(self._slot, place.header, there, digest, version + 1)

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
        _HEADER.pack_into(self._slot, header, _EMPTY, bytes(16), version)
        place = self._chunk(chunk)
        place[...] = wire
        digest = xxhash.xxh3_128_digest(place.data)
        _HEADER.pack_into(self._slot, header, version, digest, version)

    # -- fetching ----------------------------------------------------------------------------------

    def _fetch(self, work: ChunkWork, version: int, check: Callable[[], None]) -> tuple[int, int]:
        """Get one chunk into the slot; returns who it came from and how often it was read again."""
        asked: list[str] = []
        for sender in self._senders(work):
            try:
                repeats = self._fetch_from(sender, work.chunk, version, check)
            except (TransportUnavailableError, SupersededError, ClosedError):
                raise
            except WeightPlaneError as error:
                asked.append(self._give_up(sender, work.chunk, error))
                continue
            return sender, repeats
        raise StalledError(
            f"chunk {work.chunk} of weight version {version} can be had from nobody "
            f"({'; '.join(asked) or 'everybody who holds it was given up before'})"
        )

    def _senders(self, work: ChunkWork) -> list[int]:
        """Who holds a chunk and was not given up: the plan's sender first."""
        plan = self._plan
        others = (*plan.destination_holders(work.chunk), *plan.source_holders(work.chunk))
        return [
            sender
            for sender in dict.fromkeys((work.peer, *others))
            if sender not in self._dead and sender != self._endpoint and sender in self._offers
        ]

    def _give_up(self, sender: int, chunk: int, error: WeightPlaneError) -> str:
        """Ask an endpoint no more until `connect`; returns what happened."""
        self._dead.add(sender)
        name = self._plan.endpoint_name(sender)
        logger.warning("chunk %d cannot be had from %r: %s", chunk, name, error)
        return f"{name!r}: {error}"

    def _read_header(self, endpoint: int, chunk: int) -> tuple[int, bytes, int]:
        """The version of a chunk at another endpoint, its digest, and the version wanted there."""
        landing = self._landing.bytes[: _HEADER.size]
        self._reader(endpoint).read(0, self._header(endpoint, chunk), landing)
        return _HEADER.unpack(landing)

    def _fetch_from(self, sender: int, chunk: int, version: int, check: Callable[[], None]) -> int:
        reader = self._reader(sender)
        offset = self._slot_places(sender)[chunk].offset
        header = self._header(self._endpoint, chunk)
        place = self._chunk(chunk)
        _HEADER.pack_into(self._slot, header, _EMPTY, bytes(16), version)
        deadline = time.monotonic() + self._stall_seconds
        repeats = 0
        while True:
            check()
            there, digest, _ = self._read_header(sender, chunk)
            if there > version:
                raise SupersededError(f"weight version {there} has taken the place of {version}")
            if there == version:
                reader.read(0, offset, place.data)
                if xxhash.xxh3_128_digest(place.data) == digest:
                    _HEADER.pack_into(self._slot, header, version, digest, version)
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
