"""The cells of a plan: the largest boxes that lie whole in one slice on either side.

A cell is the intersection of an atom of the source (a box that a fixed set of trainer ranks holds)
with an atom of the destination (a box that a fixed set of rollout ranks needs). Atoms of one side
are disjoint, so cells are too, and a destination atom is covered exactly when the volumes of its
cells add up to its own: that is the proof of cover.

Tensors whose slices form the same pattern (all experts of a model) are worked out once, together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy

from weightplane.boxes import Atoms, Integers, intersections, remainder, split, to_atoms, volumes
from weightplane.cluster_layout import ClusterLayout
from weightplane.errors import PlanError
from weightplane.slice_table import SliceTable
from weightplane.unit_steps import common_steps, in_original_rows, relabelled

__all__ = ["BoxTable", "CellTable", "HolderSets", "Sides", "find_cells", "match_tensors"]


@dataclass(frozen=True)
class BoxTable:
    """Boxes and their holders: ``rank`` and ``tensor`` [boxes], the rest [boxes, dimensions]."""

    rank: Integers
    tensor: Integers
    start: Integers
    shape: Integers


@dataclass(frozen=True)
class Sides:
    """Both sides with one numbering of tensors (the destination's) and steps of 1.

    Attributes:
        source, destination: all boxes, sorted by tensor; the destination's number on both sides.
        source_numbers, destination_numbers: int64, a layout's number of a tensor -> the common one,
            or -1.
        shapes, factors: int64 [tensors, dimensions], for `in_original_rows`.
        item_bytes: int64 [tensors].
    """

    source: BoxTable
    destination: BoxTable
    source_numbers: Integers
    destination_numbers: Integers
    shapes: Integers
    factors: Integers
    item_bytes: Integers


@dataclass(frozen=True)
class CellTable:
    """The cells, one row each.

    Attributes:
        tensor: int64 [cells], the destination's tensor number.
        start, shape: int64 [cells, dimensions], in items, rows renumbered as `Sides` has them.
        byte_count: int64 [cells].
        sources, destinations: int64 [cells], numbers of sets of ranks.
    """

    tensor: Integers
    start: Integers
    shape: Integers
    byte_count: Integers
    sources: Integers
    destinations: Integers

    def take(self, rows: Integers) -> CellTable:
        """The rows ``rows``, in that order."""
        return CellTable(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


class HolderSets:
    """Sets of ranks, each with a number; equal sets have one number."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def sets(self) -> tuple[tuple[int, ...], ...]:
        """Every set, ascending, in the order of the numbers."""
        return tuple(self._numbers)

    def number(self, ranks: Integers) -> Integers:
        """Numbers of many sets: int64 [sets, ranks] with repetitions allowed -> int64 [sets]."""
        ranks = numpy.sort(ranks, axis=1)
        if ranks.shape[1] == 1:
            unique, inverse = numpy.unique(ranks[:, 0], return_inverse=True)
            unique = unique[:, None]
        else:
            unique, inverse = _unique_rows(ranks)
        known = self._numbers
        numbers = [known.setdefault(tuple(sorted(set(row))), len(known)) for row in unique.tolist()]
        return numpy.array(numbers, numpy.int64)[inverse]


def match_tensors(source: ClusterLayout, destination: ClusterLayout, allow_unused: bool) -> Sides:
    """Bring both sides to one numbering of tensors.

    Raises:
        PlanError: a tensor is missing on one side, differs in shape or dtype, or is tied on the
            destination only.
    """
    common, number_of = _common_numbers(source, destination, allow_unused)
    dimensions = max(source.slice_table.dimensions, destination.slice_table.dimensions)
    shapes = numpy.ones((len(destination.tensors), dimensions), numpy.int64)
    own = destination.item_shapes
    shapes[:, dimensions - own.shape[1] :] = own
    tables = [
        replace(table, tensor=numbers[table.tensor])
        for table, numbers in (
            (source.slice_table.widened(dimensions), common),
            (destination.slice_table.widened(dimensions), number_of),
        )
    ]
    factors = common_steps((tables[0], tables[1]), len(shapes), dimensions)
    boxes = [_sorted_boxes(relabelled(table, factors, shapes)) for table in tables]
    return Sides(boxes[0], boxes[1], common, number_of, shapes, factors, destination.item_bytes)


def _common_numbers(
    source: ClusterLayout, destination: ClusterLayout, allow_unused: bool
) -> tuple[Integers, Integers]:
    """The common number of every tensor of the source (or -1) and of the destination."""
    source_ties, destination_ties = dict(source.ties), dict(destination.ties)
    source_number = {spec.name: index for index, spec in enumerate(source.tensors)}
    for alias, name in destination_ties.items():
        held = source_ties.get(alias, alias)
        if held in source_number and held != source_ties.get(name, name):
            raise PlanError(
                f"the destination ties {alias!r} to {name!r}, the source holds them apart: their "
                "values may differ; tie them at the source or untie them at the destination"
            )
    common = [-1] * len(source.tensors)
    number_of = list(range(len(destination.tensors)))
    problems: list[str] = []
    for index, spec in enumerate(destination.tensors):
        row = source_number.get(source_ties.get(spec.name, spec.name))
        if row is None:
            problems.append(f"{spec.name!r} is not held by the source")
            continue
        held = source.tensors[row]
        if held.shape != spec.shape or held.dtype != spec.dtype:
            problems.append(f"{spec.name!r} is {held} at the source and {spec} at the destination")
        if common[row] < 0:
            common[row] = index
        number_of[index] = common[row]
    if not allow_unused and -1 in common:
        wanted = {source_ties.get(name, name) for name in destination_ties.values()}
        problems += [
            f"{spec.name!r} is held by the source and wanted by nobody"
            for spec, number in zip(source.tensors, common, strict=True)
            if number < 0 and spec.name not in wanted
        ]
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise PlanError(f"the layouts do not match: {'; '.join(problems[:5])}{more}")
    return numpy.array(common, numpy.int64), numpy.array(number_of, numpy.int64)


def _sorted_boxes(table: SliceTable) -> BoxTable:
    rows = numpy.argsort(table.tensor, kind="stable")
    rows = rows[numpy.searchsorted(table.tensor[rows], 0) :]
    return BoxTable(table.rank[rows], table.tensor[rows], table.start[rows], table.shape[rows])


def find_cells(
    sides: Sides, destination: ClusterLayout, chunk_bytes: int, source_sets: HolderSets,
    destination_sets: HolderSets,
) -> CellTable:  # fmt: skip
    """Every cell of the plan.

    Args:
        sides: from `match_tensors`.
        destination: for the words of an error.
        chunk_bytes: larger cells are cut.
        source_sets, destination_sets: receive the sets of ranks that the cells name.

    Raises:
        PlanError: the source does not hold all of a box that the destination needs.
    """
    parts: list[CellTable] = []
    for tensors, source_first, source_count, first, count in _patterns(sides):
        item = int(sides.item_bytes[tensors[0]])
        need = _atoms(sides.destination, first[0], count)
        have = _atoms(sides.source, source_first[0], source_count)
        held, needed, low, high = intersections(have.low, have.high, need.low, need.high)
        _require_cover(sides, destination, int(tensors[0]), need, needed, low, high)
        replicas = numpy.array([len(members) for members in have.members])
        held, needed, low, high = _cut(held, needed, low, high, item, chunk_bytes, replicas)
        source_number = _number_atoms(sides.source, have, source_first, source_sets)
        number = _number_atoms(sides.destination, need, first, destination_sets)
        shape = numpy.tile(high - low, (len(tensors), 1))
        parts.append(
            CellTable(
                numpy.repeat(tensors, len(low)),
                numpy.tile(low, (len(tensors), 1)),
                shape,
                shape.prod(axis=1) * item,
                source_number[:, held].reshape(-1),
                number[:, needed].reshape(-1),
            )
        )
    if not parts:
        none, boxes = numpy.zeros(0, numpy.int64), sides.shapes[:0]
        return CellTable(none, boxes, boxes, none, none, none)
    names = CellTable.__dataclass_fields__
    return CellTable(
        *(numpy.concatenate([getattr(part, name) for part in parts]) for name in names)
    )


def _patterns(sides: Sides) -> Iterator[tuple[Integers, Integers, int, Integers, int]]:
    """Groups of tensors whose slices are the same boxes in the same order, in a fixed order.

    Yields tensors, their first rows and the number of rows each, of the source and destination.
    """
    tensors = numpy.unique(sides.destination.tensor).astype(numpy.int64)
    bounds = [
        (numpy.searchsorted(table.tensor, tensors), numpy.searchsorted(table.tensor, tensors + 1))
        for table in (sides.source, sides.destination)
    ]
    counts = numpy.stack([bound[1] - bound[0] for bound in bounds], axis=1)
    same_counts, group = _unique_rows(counts)
    for number, (source_count, count) in enumerate(same_counts.tolist()):
        chosen = numpy.flatnonzero(group == number)
        firsts = [bound[0][chosen] for bound in bounds]
        columns = [sides.item_bytes[tensors[chosen], None]]
        for table, first, rows in zip(
            (sides.source, sides.destination), firsts, (source_count, count), strict=True
        ):
            at = first[:, None] + numpy.arange(rows)
            columns += [table.start[at].reshape(len(at), -1), table.shape[at].reshape(len(at), -1)]
        _, pattern = _unique_rows(numpy.concatenate(columns, axis=1))
        order = numpy.argsort(pattern, kind="stable")
        for rows in numpy.split(order, numpy.flatnonzero(numpy.diff(pattern[order])) + 1):
            yield tensors[chosen[rows]], firsts[0][rows], source_count, firsts[1][rows], count


def _atoms(table: BoxTable, first: int, count: int) -> Atoms:
    low = table.start[first : first + count]
    return to_atoms(low, low + table.shape[first : first + count])


def _number_atoms(table: BoxTable, atoms: Atoms, first: Integers, sets: HolderSets) -> Integers:
    """int64 [tensors, atoms]: the set of ranks that hold each atom of each tensor."""
    numbers = numpy.empty((len(first), len(atoms.members)), numpy.int64)
    lengths = numpy.array([len(members) for members in atoms.members])
    for length in numpy.unique(lengths).tolist():
        chosen = numpy.flatnonzero(lengths == length)
        members = numpy.array([atoms.members[atom] for atom in chosen.tolist()])
        ranks = table.rank[first[:, None, None] + members[None]].astype(numpy.int64)
        numbers[:, chosen] = sets.number(ranks.reshape(-1, length)).reshape(len(first), -1)
    return numbers


def _require_cover(
    sides: Sides, destination: ClusterLayout, tensor: int, need: Atoms, needed: Integers,
    low: Integers, high: Integers,
) -> None:  # fmt: skip
    covered = numpy.zeros(len(need.low), numpy.int64)
    numpy.add.at(covered, needed, volumes(low, high))
    wrong = covered != volumes(need.low, need.high)
    if not wrong.any():
        return
    atom = int(wrong.argmax())
    cells = needed == atom
    missing = remainder(need.low[atom], need.high[atom], low[cells], high[cells])
    start = numpy.stack([part[0] for part in missing[:1]])
    number = numpy.array([tensor])
    first, step = in_original_rows(start, number, sides.factors, sides.shapes)
    extent = missing[0][1] - missing[0][0]
    spec = destination.tensors[tensor]
    skip = sides.shapes.shape[1] - len(spec.shape)
    box = ", ".join(
        f"{begin}:{begin + (count - 1) * by + 1}" + (f":{by}" if by > 1 else "")
        for begin, count, by in zip(
            first[0, skip:].tolist(), extent[skip:].tolist(), step[0, skip:].tolist(), strict=True
        )
    )
    rows = numpy.flatnonzero(sides.destination.tensor == tensor)[list(need.members[atom])]
    rank = destination.ranks[int(sides.destination.rank[rows[0]])]
    raise PlanError(
        f"no source rank holds {spec.name}[{box}] (in items of {spec}), which rank {rank!r} needs"
    )


def _cut(
    held: Integers, needed: Integers, low: Integers, high: Integers, item: int, chunk_bytes: int,
    replicas: Integers,
) -> tuple[Integers, Integers, Integers, Integers]:  # fmt: skip
    """Cut cells that are larger than a chunk; finer where several sources share the work."""
    limits = numpy.where(replicas[held] > 1, max(chunk_bytes // 8, 1), chunk_bytes)
    large = volumes(low, high) * item > limits
    if not large.any():
        return held, needed, low, high
    lows, highs, origin = [low[~large]], [high[~large]], [numpy.flatnonzero(~large)]
    for cell in numpy.flatnonzero(large).tolist():
        part_low, part_high = split(low[cell], high[cell], item, int(limits[cell]))
        lows.append(part_low)
        highs.append(part_high)
        origin.append(numpy.full(len(part_low), cell))
    rows = numpy.concatenate(origin)
    return held[rows], needed[rows], numpy.concatenate(lows), numpy.concatenate(highs)


def _unique_rows(values: Integers) -> tuple[Integers, Integers]:
    """Distinct rows in the order of their first, and for every row the number of its equal.

    Through a dictionary of their bytes: sorting rows of some hundred bytes takes much longer.
    """
    rows = numpy.ascontiguousarray(values, numpy.int64)
    numbers: dict[bytes, int] = {}
    packed = rows.view(numpy.dtype((numpy.void, rows.shape[1] * 8))).reshape(-1)
    inverse = numpy.array(
        [numbers.setdefault(key, len(numbers)) for key in packed.tolist()], numpy.int64
    )
    first = numpy.empty(len(numbers), numpy.int64)
    first[inverse[::-1]] = numpy.arange(len(inverse))[::-1]
    return rows[first], inverse
