"""From who holds what and who needs what to who sends what to whom, when.

`plan` is a pure function: every rank that knows both layouts computes the same `Plan`, and compares
digests instead of exchanging it. The plan moves the minimum: every byte leaves the trainer once and
reaches every rank that needs it once; it is refused unless the source provably covers the
destination. See `weightplane.plan_cells` for the proof and `weightplane.plan_routes` for the paths.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy

from weightplane.boxes import Integers
from weightplane.cluster_layout import ClusterLayout
from weightplane.errors import InvalidArgumentError, PlanError
from weightplane.plan_cells import CellTable, HolderSets, Sides, find_cells, match_tensors
from weightplane.plan_part import ChunkWork, PartReader, RankPart
from weightplane.plan_routes import bundle, choose_sources, rounds, route
from weightplane.storage_cover import require_full_storages
from weightplane.unit_steps import in_original_rows

__all__ = ["Plan", "PlanSettings", "plan"]


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What a plan may choose.

    Attributes:
        chunk_bytes: size of a chunk to aim at; a chunk is what is verified and re-sent as a whole.
        relay: destination ranks hand chunks on to one another. Without it every replica costs the
            trainer another copy of the model.
        relay_fan_out: receivers that a receiver hands a chunk on to; 1, a chain, is the fastest
            once it is full, more are sooner full.
        ranks_per_host: consecutive destination ranks that share a host; relays cross the network
            once per host.
        allow_unused: accept source tensors that the destination does not name.
    """

    chunk_bytes: int = 32 << 20
    relay: bool = True
    relay_fan_out: int = 1
    ranks_per_host: int = 8
    allow_unused: bool = False

    def __post_init__(self) -> None:
        for name in ("chunk_bytes", "relay_fan_out", "ranks_per_host"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}; use at least 1")


@dataclass(frozen=True, eq=False)
class Plan:
    """Every chunk, and every hop of every chunk. All columns are read-only.

    Endpoints number the source ranks first, then the destination ranks. ``start``, ``shape`` and
    ``step`` of cells are in items (`weightplane.slice_table`).

    Attributes:
        source, destination, settings: what the plan was computed from.
        cell_tensor: int64 [cells], number of the destination's tensor.
        cell_start, cell_shape, cell_step: int64 [cells, dimensions].
        cell_bytes: int64 [cells].
        chunk_cells: int64 [chunks + 1]: chunk ``c`` is the cells from entry ``c`` to ``c + 1``.
        chunk_bytes: int64 [chunks].
        hop_chunk, hop_sender, hop_receiver, hop_depends_on, hop_round: int64 [hops].
    """

    source: ClusterLayout
    destination: ClusterLayout
    settings: PlanSettings
    cell_tensor: Integers
    cell_start: Integers
    cell_shape: Integers
    cell_step: Integers
    cell_bytes: Integers
    chunk_cells: Integers
    chunk_bytes: Integers
    hop_chunk: Integers
    hop_sender: Integers
    hop_receiver: Integers
    hop_depends_on: Integers
    hop_round: Integers
    _cells: CellTable
    _sides: Sides
    _source_sets: tuple[tuple[int, ...], ...]
    _destination_sets: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for name in COLUMNS:
            column = numpy.ascontiguousarray(getattr(self, name), numpy.int64).view()
            column.flags.writeable = False
            object.__setattr__(self, name, column)

    @property
    def endpoints(self) -> int:
        """How many endpoints there are."""
        return self.source.size + self.destination.size

    def endpoint_name(self, endpoint: int) -> str:
        """The rank's name."""
        sources = self.source.size
        if endpoint < sources:
            return self.source.ranks[endpoint]
        return self.destination.ranks[endpoint - sources]

    @cached_property
    def hop_bytes(self) -> Integers:
        """int64 [hops]: bytes on the wire of each hop."""
        return self.chunk_bytes[self.hop_chunk]

    @property
    def wire_bytes(self) -> int:
        """Bytes of all hops together."""
        return int(self.hop_bytes.sum())

    @cached_property
    def minimum_bytes(self) -> int:
        """What the destination ranks need, every byte of every rank once; no plan sends less."""
        sizes = numpy.array([len(ranks) for ranks in self._destination_sets], numpy.int64)
        return int((self._cells.byte_count * sizes[self._cells.destinations]).sum())

    @cached_property
    def minimum_egress_bytes(self) -> int:
        """What the destination needs, every byte once; no plan takes less from the trainer."""
        return int(self.cell_bytes.sum())

    def needed_bytes(self, groups: Integers) -> Integers:
        """What groups of destination ranks need together, every byte once: int64 [groups].

        Args:
            groups: int64 [destination ranks], the group of each rank, from 0.
        """
        totals = numpy.zeros(int(groups.max()) + 1, numpy.int64)
        per_set = numpy.zeros(len(self._destination_sets), numpy.int64)
        numpy.add.at(per_set, self._cells.destinations, self.cell_bytes)
        for number, ranks in enumerate(self._destination_sets):
            totals[numpy.unique(groups[list(ranks)])] += per_set[number]
        return totals

    @cached_property
    def fixed_egress_bytes(self) -> Integers:
        """int64 [source ranks]: bytes that each rank has to send because nobody else holds them."""
        totals = numpy.zeros(self.source.size, numpy.int64)
        per_set = numpy.zeros(len(self._source_sets), numpy.int64)
        numpy.add.at(per_set, self._cells.sources, self.cell_bytes)
        for number, ranks in enumerate(self._source_sets):
            if len(ranks) == 1:
                totals[ranks[0]] += per_set[number]
        return totals

    @cached_property
    def egress_bytes(self) -> Integers:
        """int64 [endpoints]: bytes that each endpoint sends."""
        return self._per_endpoint(self.hop_sender)

    @cached_property
    def ingress_bytes(self) -> Integers:
        """int64 [endpoints]: bytes that each endpoint receives."""
        return self._per_endpoint(self.hop_receiver)

    @property
    def rounds(self) -> int:
        """How many rounds there are."""
        return int(self.hop_round.max()) + 1 if len(self.hop_round) else 0

    def source_holders(self, chunk: int) -> tuple[int, ...]:
        """Source endpoints that hold all of a chunk: any of them may send it."""
        return self._source_sets[int(self._cells.sources[self.chunk_cells[chunk]])]

    def destination_holders(self, chunk: int) -> tuple[int, ...]:
        """Destination endpoints that receive a chunk: any of them may hand it on."""
        ranks = self._destination_sets[int(self._cells.destinations[self.chunk_cells[chunk]])]
        return tuple(rank + self.source.size for rank in ranks)

    def part(self, endpoint: int) -> RankPart:
        """Everything that one endpoint sends, receives and fills.

        Raises:
            InvalidArgumentError: there is no such endpoint.
        """
        reader = self._reader(endpoint)
        sends = numpy.flatnonzero(self.hop_sender == endpoint)
        receives = numpy.flatnonzero(self.hop_receiver == endpoint)
        return RankPart(
            endpoint,
            self.endpoint_name(endpoint),
            reader.arena_bytes,
            tuple(self._work(reader, receives, self.hop_sender, every_copy=True)),
            tuple(self._work(reader, sends, self.hop_receiver, every_copy=False)),
            reader.fills,
        )

    def reader(self, endpoint: int, chunk: int) -> ChunkWork:
        """How ``endpoint`` reads a chunk that it holds, for example in place of a dead sender.

        Raises:
            PlanError: the endpoint does not hold all of the chunk.
        """
        if endpoint not in (*self.source_holders(chunk), *self.destination_holders(chunk)):
            raise PlanError(f"{self.endpoint_name(endpoint)!r} does not hold all of chunk {chunk}")
        cells = numpy.arange(self.chunk_cells[chunk], self.chunk_cells[chunk + 1])
        regions = self._reader(endpoint).regions(self._cells, cells, numpy.zeros_like(cells))
        return ChunkWork(-1, chunk, -1, -1, -1, int(self.chunk_bytes[chunk]), regions[0])

    @cached_property
    def digest(self) -> str:
        """32 hexadecimal digits over layouts, settings and every column."""
        state = hashlib.blake2b(digest_size=16)
        header = (self.source.digest, self.destination.digest, self.settings)
        state.update(msgspec.json.encode(header))
        for name in COLUMNS:
            state.update(getattr(self, name).astype("<i8", copy=False).tobytes())
        return state.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def to_json(self) -> bytes:
        """Canonical JSON: the same bytes for the same plan, whoever writes it."""
        document: dict[str, Any] = {name: getattr(self, name).tolist() for name in COLUMNS}
        document["source"] = msgspec.Raw(self.source.to_json())
        document["destination"] = msgspec.Raw(self.destination.to_json())
        document["settings"] = self.settings
        document["digest"] = self.digest
        return msgspec.json.encode(document, order="sorted")

    @classmethod
    def from_json(cls, document: bytes) -> Plan:
        """Read what `to_json` wrote, and compute the plan again to verify it.

        Raises:
            PlanError: the document is malformed, or is not the plan that its layouts lead to.
            LayoutError: one of its layouts is malformed.
        """
        try:
            read = msgspec.json.decode(document, type=_Document)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise PlanError(f"not a plan: {error}") from error
        source = ClusterLayout.from_json(bytes(read.source))
        destination = ClusterLayout.from_json(bytes(read.destination))
        again = plan(source, destination, read.settings)
        for name in COLUMNS:
            if getattr(again, name).tolist() != getattr(read, name):
                raise PlanError(
                    f"the plan's {name} is not what its layouts lead to: it was changed, or comes "
                    "from another release"
                )
        if again.digest != read.digest:
            raise PlanError(f"the plan's digest is {read.digest}, its content has {again.digest}")
        return again

    def _per_endpoint(self, endpoints: Integers) -> Integers:
        totals = numpy.zeros(self.endpoints, numpy.int64)
        numpy.add.at(totals, endpoints, self.hop_bytes)
        return totals

    def _reader(self, endpoint: int) -> PartReader:
        if not 0 <= endpoint < self.endpoints:
            raise InvalidArgumentError(f"endpoint is {endpoint}; there are {self.endpoints}")
        sides, sources = self._sides, self.source.size
        if endpoint < sources:
            return PartReader(self.source, sides, sides.source_numbers, endpoint, fill=False)
        rank = endpoint - sources
        return PartReader(self.destination, sides, sides.destination_numbers, rank, fill=True)

    def _work(
        self, reader: PartReader, hops: Integers, peers: Integers, every_copy: bool
    ) -> list[ChunkWork]:
        hops = hops[numpy.argsort(self.hop_round[hops], kind="stable")]
        chunks = self.hop_chunk[hops]
        counts = self.chunk_cells[chunks + 1] - self.chunk_cells[chunks]
        owner = numpy.repeat(numpy.arange(len(hops)), counts)
        first = numpy.cumsum(counts) - counts
        cells = numpy.arange(int(counts.sum())) - first[owner] + self.chunk_cells[chunks][owner]
        regions = reader.regions(self._cells, cells, owner, every_copy)
        return [
            ChunkWork(hop, chunk, peer, round_, before, byte_count, regions[number])
            for number, (hop, chunk, peer, round_, before, byte_count) in enumerate(
                zip(
                    hops.tolist(), chunks.tolist(), peers[hops].tolist(),
                    self.hop_round[hops].tolist(), self.hop_depends_on[hops].tolist(),
                    self.chunk_bytes[chunks].tolist(), strict=True,
                )
            )
        ]  # fmt: skip


COLUMNS = (
    "cell_tensor", "cell_start", "cell_shape", "cell_step", "cell_bytes", "chunk_cells",
    "chunk_bytes", "hop_chunk", "hop_sender", "hop_receiver", "hop_depends_on", "hop_round",
)  # fmt: skip
"""The columns of a plan that its digest covers, in its order."""


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    source: msgspec.Raw
    destination: msgspec.Raw
    settings: PlanSettings
    digest: str
    cell_tensor: list[int]
    cell_start: list[list[int]]
    cell_shape: list[list[int]]
    cell_step: list[list[int]]
    cell_bytes: list[int]
    chunk_cells: list[int]
    chunk_bytes: list[int]
    hop_chunk: list[int]
    hop_sender: list[int]
    hop_receiver: list[int]
    hop_depends_on: list[int]
    hop_round: list[int]


def plan(
    source: ClusterLayout,
    destination: ClusterLayout,
    settings: PlanSettings | None = None,
) -> Plan:
    """The plan that gives every destination rank what it needs.

    Args:
        source: what the trainer's ranks (or the replicas that a late joiner copies from) hold.
        destination: what the ranks of all rollout replicas need.
        settings: `PlanSettings` with its defaults if None.

    Raises:
        PlanError: the layouts do not match, or the source does not hold a box that is needed.
        LayoutError: destination slices overlap in memory, or leave bytes of a storage unwritten
            that are not declared as padding.
    """
    chosen = PlanSettings() if settings is None else settings
    require_full_storages(destination)
    sides = match_tensors(source, destination, chosen.allow_unused)
    source_sets, destination_sets = HolderSets(), HolderSets()
    cells = find_cells(sides, destination, chosen.chunk_bytes, source_sets, destination_sets)
    holders, receivers = source_sets.sets(), destination_sets.sets()
    if not chosen.relay:
        cells, receivers = _one_receiver_each(cells, receivers)
    cells, first = bundle(cells, _sizes(holders), _sizes(receivers), chosen.chunk_bytes)
    begin = first[:-1]
    ends = numpy.concatenate([[0], numpy.cumsum(cells.byte_count)])
    byte_count = ends[first[1:]] - ends[begin]
    from_rank = choose_sources(byte_count, cells.sources[begin], holders, source.size)
    hops = route(
        from_rank,
        cells.destinations[begin],
        receivers,
        source.size,
        chosen.relay_fan_out,
        chosen.ranks_per_host,
    )
    order = rounds(hops, hosts_of(source, destination, chosen.ranks_per_host))
    start, step = in_original_rows(cells.start, cells.tensor, sides.factors, sides.shapes)
    return Plan(
        source, destination, chosen, cells.tensor, start, cells.shape, step, cells.byte_count,
        first, byte_count, hops.chunk, hops.sender, hops.receiver, hops.depends_on, order,
        cells, sides, holders, receivers,
    )  # fmt: skip


def hosts_of(source: ClusterLayout, destination: ClusterLayout, ranks_per_host: int) -> Integers:
    """int64 [endpoints]: the host of every endpoint; consecutive ranks of one side share one."""
    trainer = numpy.arange(source.size) // ranks_per_host
    rollout = numpy.arange(destination.size) // ranks_per_host
    return numpy.concatenate([trainer, int(trainer[-1]) + 1 + rollout])


def _sizes(sets: tuple[tuple[int, ...], ...]) -> Integers:
    return numpy.array([len(ranks) for ranks in sets], numpy.int64)


def _one_receiver_each(
    cells: CellTable, receivers: tuple[tuple[int, ...], ...]
) -> tuple[CellTable, tuple[tuple[int, ...], ...]]:
    """Cells repeated for every rank that needs them, so that none has a choice of receivers."""
    sizes = _sizes(receivers)[cells.destinations]
    rows = numpy.repeat(numpy.arange(len(sizes)), sizes)
    ranks = [rank for number in cells.destinations.tolist() for rank in receivers[number]]
    singles = numpy.unique(numpy.array(ranks, numpy.int64))
    taken = cells.take(rows)
    numbers = numpy.searchsorted(singles, ranks)
    columns = {name: getattr(taken, name) for name in CellTable.__dataclass_fields__}
    single_sets = tuple((rank,) for rank in singles.tolist())
    return CellTable(**{**columns, "destinations": numbers}), single_sets
