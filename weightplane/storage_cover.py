"""Proof that the slices of a destination fill its storages: no byte twice, none forgotten.

A forgotten byte would serve whatever the memory held before; a byte written twice would serve
whichever chunk came last. Both are refused before anything is sent. Bytes that are declared as
padding are zeroed by whoever executes the plan.
"""

from __future__ import annotations

import numpy

from weightplane.boxes import Integers
from weightplane.cluster_layout import ClusterLayout
from weightplane.errors import LayoutError
from weightplane.slice_table import SliceTable

__all__ = ["padding_ranges", "require_full_storages"]


def require_full_storages(layout: ClusterLayout) -> None:
    """Raise `LayoutError` unless the slices of every storage are disjoint and fill it.

    Padding counts as filled; there must be exactly as much of it as is declared.
    """
    table, storages = layout.slice_table, layout.storage_table
    item = layout.item_bytes[table.tensor]
    extent = ((table.shape - 1) * table.strides).sum(axis=1) + item
    byte_count = table.shape.prod(axis=1) * item
    base = numpy.cumsum(layout.arena_bytes) - layout.arena_bytes
    low = base[table.rank] + table.offset
    order = numpy.argsort(low, kind="stable")
    low, high = low[order], (low + extent)[order]
    reach = numpy.maximum.accumulate(high)
    # Runs of slices whose spans overlap; most spans are dense and stand alone.
    begins = numpy.ones(len(order), bool)
    begins[1:] = low[1:] >= reach[:-1]
    lonely = begins.copy()
    lonely[:-1] &= begins[1:]
    crowded = numpy.flatnonzero(~lonely)
    if len(crowded):
        cluster = numpy.cumsum(begins)[crowded]
        for rows in numpy.split(crowded, numpy.flatnonzero(numpy.diff(cluster)) + 1):
            _require_disjoint(layout, order[rows])
    # A slice that overlaps itself has fewer bytes in its span than it has items.
    folded = byte_count > extent
    if folded.any():
        raise LayoutError(f"{layout.describe(int(folded.argmax()))} writes a byte twice")
    ragged = numpy.flatnonzero(byte_count != extent)
    for row in ragged.tolist():
        if not _strides_nest(table, row, int(item[row])):
            _require_disjoint(layout, numpy.array([row]))
    covered = numpy.zeros(len(storages), numpy.int64)
    numpy.add.at(covered, table.storage, byte_count)
    wrong = covered + storages.padding_bytes != storages.byte_count
    if wrong.any():
        row = int(wrong.argmax())
        missing = int(storages.byte_count[row] - covered[row])
        raise LayoutError(
            f"storage {storages.names[row]!r} of rank {layout.ranks[int(storages.rank[row])]!r} "
            f"has {missing} bytes that no slice fills and declares {storages.padding_bytes[row]} "
            "as padding: name the tensors that fill it, or declare the padding"
        )


def padding_ranges(layout: ClusterLayout, rank: int) -> tuple[tuple[int, int], ...]:
    """(offset, bytes) of the arena of one rank that its storages declare as padding."""
    table, storages = layout.slice_table, layout.storage_table
    ranges: list[tuple[int, int]] = []
    for storage in numpy.flatnonzero((storages.rank == rank) & (storages.padding_bytes > 0)):
        rows = numpy.flatnonzero(table.storage == storage)
        starts, ends = _runs(layout, rows)
        at = int(storages.offset[storage])
        stop = at + int(storages.byte_count[storage])
        gaps_from = numpy.concatenate([[at], ends])
        gaps_to = numpy.concatenate([starts, [stop]])
        for begin, end in zip(gaps_from.tolist(), gaps_to.tolist(), strict=True):
            if end > begin:
                ranges.append((begin, end - begin))
    return tuple(ranges)


def _strides_nest(table: SliceTable, row: int, item: int) -> bool:
    """Whether each stride is at least the span of all smaller ones: then no item meets another."""
    span = item
    pairs = zip(table.strides[row].tolist(), table.shape[row].tolist(), strict=True)
    for stride, extent in sorted(pair for pair in pairs if pair[1] > 1):
        if stride < span:
            return False
        span = stride * (extent - 1) + span
    return True


def _runs(layout: ClusterLayout, rows: Integers) -> tuple[Integers, Integers]:
    """Starts and ends of the contiguous runs of slices in the arena, sorted by start."""
    table = layout.slice_table
    starts: list[Integers] = [numpy.zeros(0, numpy.int64)]
    lengths: list[Integers] = [numpy.zeros(0, numpy.int64)]
    for row in rows.tolist():
        run = int(layout.item_bytes[table.tensor[row]])
        places = table.offset[row : row + 1]
        pairs = zip(table.strides[row].tolist(), table.shape[row].tolist(), strict=True)
        for stride, extent in sorted(pair for pair in pairs if pair[1] > 1):
            if stride == run and len(places) == 1:
                run *= extent
            else:
                steps = numpy.arange(extent, dtype=numpy.int64) * stride
                places = (places[:, None] + steps).reshape(-1)
        starts.append(places)
        lengths.append(numpy.full(len(places), run, numpy.int64))
    start, length = numpy.concatenate(starts), numpy.concatenate(lengths)
    order = numpy.argsort(start, kind="stable")
    return start[order], (start + length)[order]


def _require_disjoint(layout: ClusterLayout, rows: Integers) -> None:
    starts, ends = _runs(layout, rows)
    if not (starts[1:] < ends[:-1]).any():
        return
    table = layout.slice_table
    if len(rows) == 1:
        raise LayoutError(f"{layout.describe(int(rows[0]))} writes a byte twice")
    for first, second in zip(rows[:-1].tolist(), rows[1:].tolist(), strict=True):
        pair_starts, pair_ends = _runs(layout, numpy.array([first, second]))
        if (pair_starts[1:] < pair_ends[:-1]).any():
            raise LayoutError(
                f"{layout.describe(first)} and {layout.describe(second)} write the same bytes: "
                "an engine that shares this memory needs a tie"
            )
    rank = layout.ranks[int(table.rank[rows[0]])]
    raise LayoutError(f"slices of rank {rank!r} near {layout.describe(int(rows[0]))} overlap")
