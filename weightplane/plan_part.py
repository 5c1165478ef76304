"""What one endpoint does: which bytes of its arena go into which bytes of a chunk, or come out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy

from weightplane.boxes import Integers
from weightplane.cluster_layout import ClusterLayout
from weightplane.errors import PlanError
from weightplane.plan_cells import CellTable, Sides
from weightplane.slice_table import SliceTable
from weightplane.storage_cover import padding_ranges
from weightplane.unit_steps import relabelled

__all__ = ["ChunkWork", "PartReader", "RankPart", "Region"]


@dataclass(frozen=True, slots=True)
class Region:
    """A strided box of the arena whose items lie one after the other, row-major, on the wire.

    Attributes:
        wire_offset: byte of the first item in the chunk.
        offset: byte of the first item in the arena.
        shape: items per dimension.
        strides: bytes in the arena from item to item, per dimension.
        item_bytes: bytes of an item.
    """

    wire_offset: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int

    @property
    def byte_count(self) -> int:
        """Bytes on the wire."""
        return math.prod(self.shape) * self.item_bytes

    def runs(self) -> tuple[Integers, Integers, Integers]:
        """Contiguous runs: arena offsets, wire offsets and bytes, each int64 [runs]."""
        run, dimension = self.item_bytes, len(self.shape)
        while dimension and (self.shape[dimension - 1] == 1 or self.strides[dimension - 1] == run):
            dimension -= 1
            run *= self.shape[dimension]
        offsets = numpy.array([self.offset], numpy.int64)
        for extent, stride in zip(self.shape[:dimension], self.strides[:dimension], strict=True):
            steps = numpy.arange(extent, dtype=numpy.int64) * stride
            offsets = (offsets[:, None] + steps).reshape(-1)
        wire = self.wire_offset + numpy.arange(len(offsets), dtype=numpy.int64) * run
        return offsets, wire, numpy.full(len(offsets), run, numpy.int64)


@dataclass(frozen=True, slots=True)
class ChunkWork:
    """One endpoint's end of one hop.

    Attributes:
        hop: its number, -1 for a read that no hop asks for.
        chunk: number of the chunk.
        peer: the endpoint at the other end.
        round: hops of lower rounds come first.
        depends_on: the hop by which the sender got the chunk, -1 if it always had it.
        byte_count: bytes on the wire.
        regions: cover the wire bytes in order; where a receiver needs the same bytes at several
            places, several regions have the same ``wire_offset``.
    """

    hop: int
    chunk: int
    peer: int
    round: int
    depends_on: int
    byte_count: int
    regions: tuple[Region, ...]


@dataclass(frozen=True, slots=True)
class RankPart:
    """One endpoint's part of a plan.

    Attributes:
        endpoint, name: who.
        arena_bytes: bytes of its arena.
        receives, sends: in the order of the rounds.
        fills: (offset, bytes) of the arena to zero before the new version is whole.
    """

    endpoint: int
    name: str
    arena_bytes: int
    receives: tuple[ChunkWork, ...]
    sends: tuple[ChunkWork, ...]
    fills: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class PartReader:
    """Finds cells in the slices of one rank.

    Args:
        layout: of the rank's side.
        sides: what the plan matched.
        numbers: of that side's tensors.
        rank: number of the rank.
        fill: whether this is a destination, which zeroes its padding.
    """

    layout: ClusterLayout
    sides: Sides
    numbers: Integers
    rank: int
    fill: bool
    own: SliceTable = field(init=False)

    def __post_init__(self) -> None:
        table = self.layout.slice_table
        own = table.take(numpy.flatnonzero(table.rank == self.rank))
        own = replace(own, tensor=self.numbers[own.tensor])
        own = own.widened(self.sides.shapes.shape[1])
        own = relabelled(own, self.sides.factors, self.sides.shapes)
        object.__setattr__(self, "own", own.take(numpy.argsort(own.tensor, kind="stable")))

    @property
    def arena_bytes(self) -> int:
        """Bytes of the rank's arena."""
        return int(self.layout.arena_bytes[self.rank])

    @property
    def fills(self) -> tuple[tuple[int, int], ...]:
        """The padding of a destination rank; nothing for a source."""
        return padding_ranges(self.layout, self.rank) if self.fill else ()

    def regions(
        self, cells: CellTable, chosen: Integers, owner: Integers, every_copy: bool = False
    ) -> list[tuple[Region, ...]]:
        """Where each cell lies in the arena.

        Args:
            cells: the plan's cells.
            chosen: int64 [n], cells in the order of the wire.
            owner: int64 [n], ascending number of the result that each cell belongs to.
            every_copy: all places that hold a cell, to write; else the first, to read.

        Returns:
            One tuple of regions per owner.
        """
        own = self.own
        tensor, start, shape = cells.tensor[chosen], cells.start[chosen], cells.shape[chosen]
        first = numpy.searchsorted(own.tensor, tensor)
        count = numpy.searchsorted(own.tensor, tensor, side="right") - first
        cell = numpy.repeat(numpy.arange(len(chosen)), count)
        row = numpy.arange(len(cell)) - (numpy.cumsum(count) - count)[cell] + first[cell]
        inside = (own.start[row] <= start[cell]).all(axis=1)
        inside &= (start[cell] + shape[cell] <= own.start[row] + own.shape[row]).all(axis=1)
        cell, row = cell[inside], row[inside]
        if not every_copy:
            cell, unique = numpy.unique(cell, return_index=True)
            row = row[unique]
        if len(numpy.unique(cell)) != len(chosen):
            raise PlanError(f"rank {self.layout.ranks[self.rank]!r} lacks a cell of the plan")
        offset = own.offset[row] + ((start[cell] - own.start[row]) * own.strides[row]).sum(axis=1)
        byte_count = cells.byte_count[chosen]
        before = numpy.cumsum(byte_count) - byte_count
        owners = int(owner[-1]) + 1 if len(owner) else 0
        begin = before[numpy.searchsorted(owner, numpy.arange(owners))] if owners else before
        wire = (before - begin[owner])[cell]
        grouped: list[list[Region]] = [[] for _ in range(owners)]
        for who, *values in zip(
            owner[cell].tolist(), wire.tolist(), offset.tolist(), shape[cell].tolist(),
            own.strides[row].tolist(), self.sides.item_bytes[tensor[cell]].tolist(), strict=True,
        ):  # fmt: skip
            wire_offset, place, extents, strides, item = values
            grouped[who].append(Region(wire_offset, place, tuple(extents), tuple(strides), item))
        return [tuple(regions) for regions in grouped]
