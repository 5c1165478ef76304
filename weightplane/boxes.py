"""Arithmetic of boxes: intersections, disjoint atoms, and what a set of boxes leaves uncovered.

Boxes are two int64 arrays [boxes, dimensions], ``low`` inclusive and ``high`` exclusive.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

__all__ = ["Atoms", "Integers", "intersections", "remainder", "split", "to_atoms", "volumes"]

Integers = NDArray[numpy.int64]

_PAIRS_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Atoms:
    """Disjoint boxes, and for each the numbers of the given boxes that contain it.

    Attributes:
        low, high: int64 [atoms, dimensions].
        members: per atom, ascending numbers of boxes.
    """

    low: Integers
    high: Integers
    members: tuple[tuple[int, ...], ...]


def volumes(low: Integers, high: Integers) -> Integers:
    """Items of each box, int64 [boxes]."""
    return (high - low).prod(axis=1)


def intersections(
    low: Integers, high: Integers, other_low: Integers, other_high: Integers
) -> tuple[Integers, Integers, Integers, Integers]:
    """All pairs of boxes that meet.

    Returns:
        Numbers of the first and of the second box, and the common box's low and high; in the order
        of the first numbers, then the second.
    """
    rows = max(1, _PAIRS_AT_ONCE // max(1, len(other_low)))
    found: list[tuple[Integers, Integers, Integers, Integers]] = []
    for begin in range(0, len(low), rows):
        block = slice(begin, begin + rows)
        common_low = numpy.maximum(low[block, None], other_low[None])
        common_high = numpy.minimum(high[block, None], other_high[None])
        first, second = numpy.nonzero((common_low < common_high).all(axis=2))
        found.append((first + begin, second, common_low[first, second], common_high[first, second]))
    if not found:
        none = numpy.zeros(0, numpy.int64)
        return none, none, low[:0], high[:0]
    first, second, common_low, common_high = (
        numpy.concatenate([part[i] for part in found]) for i in range(4)
    )
    return first, second, common_low, common_high


def to_atoms(low: Integers, high: Integers) -> Atoms:
    """The coarsest disjoint boxes that this construction finds such that every given box is a
    union of some of them.

    Equal boxes become one atom; where different boxes overlap, they are cut along each other.
    """
    keys: dict[bytes, list[int]] = {}
    corners = numpy.ascontiguousarray(numpy.concatenate([low, high], axis=1))
    for number in range(len(low)):
        keys.setdefault(corners[number].tobytes(), []).append(number)
    members = [tuple(numbers) for numbers in keys.values()]
    firsts = [numbers[0] for numbers in members]
    low, high = low[firsts], high[firsts]
    first, _, _, _ = intersections(low, high, low, high)
    if len(first) == len(low):
        return Atoms(low, high, tuple(members))
    return _overlay(low, high, members)


def _overlay(low: Integers, high: Integers, members: list[tuple[int, ...]]) -> Atoms:
    atoms: list[tuple[Integers, Integers, set[int]]] = []
    for number in range(len(low)):
        fresh = [(low[number], high[number])]
        kept: list[tuple[Integers, Integers, set[int]]] = []
        for atom_low, atom_high, holders in atoms:
            inner_low = numpy.maximum(atom_low, low[number])
            inner_high = numpy.minimum(atom_high, high[number])
            if (inner_low >= inner_high).any():
                kept.append((atom_low, atom_high, holders))
                continue
            kept.append((inner_low, inner_high, holders | set(members[number])))
            for part_low, part_high in _difference(atom_low, atom_high, inner_low, inner_high):
                kept.append((part_low, part_high, set(holders)))
            fresh = [
                part for box in fresh for part in _difference(box[0], box[1], inner_low, inner_high)
            ]
        atoms = kept + [(part[0], part[1], set(members[number])) for part in fresh]
    atoms.sort(key=lambda atom: (*atom[0].tolist(), *atom[1].tolist()))
    return Atoms(
        numpy.array([atom[0] for atom in atoms], numpy.int64).reshape(len(atoms), low.shape[1]),
        numpy.array([atom[1] for atom in atoms], numpy.int64).reshape(len(atoms), low.shape[1]),
        tuple(tuple(sorted(atom[2])) for atom in atoms),
    )


def _difference(
    low: Integers, high: Integers, cut_low: Integers, cut_high: Integers
) -> list[tuple[Integers, Integers]]:
    """Disjoint boxes that make up the first box without the second."""
    inner_low, inner_high = numpy.maximum(low, cut_low), numpy.minimum(high, cut_high)
    if (inner_low >= inner_high).any():
        return [(low, high)]
    parts: list[tuple[Integers, Integers]] = []
    low, high = low.copy(), high.copy()
    for dimension in range(len(low)):
        if low[dimension] < inner_low[dimension]:
            end = high.copy()
            end[dimension] = inner_low[dimension]
            parts.append((low.copy(), end))
            low[dimension] = inner_low[dimension]
        if inner_high[dimension] < high[dimension]:
            begin = low.copy()
            begin[dimension] = inner_high[dimension]
            parts.append((begin, high.copy()))
            high[dimension] = inner_high[dimension]
    return parts


def remainder(
    low: Integers, high: Integers, cover_low: Integers, cover_high: Integers
) -> list[tuple[Integers, Integers]]:
    """Disjoint boxes that make up the box [low, high) without all of the others."""
    left = [(low, high)]
    for number in range(len(cover_low)):
        left = [
            part
            for box in left
            for part in _difference(box[0], box[1], cover_low[number], cover_high[number])
        ]
    return left


def split(low: Integers, high: Integers, item: int, limit: int) -> tuple[Integers, Integers]:
    """Cut one box into near-equal pieces of at most ``limit`` bytes where single items allow it.

    The first dimensions are cut first, so that pieces keep long contiguous runs.

    Args:
        low, high: int64 [dimensions].
        item: bytes of an item.
        limit: bytes, at least 1.
    """
    pieces = [(low, high)]
    for dimension in range(len(low)):
        inner = int((high - low)[dimension + 1 :].prod()) * item
        extent = int(high[dimension] - low[dimension])
        parts = min(extent, -(-extent * inner // limit))
        if parts > 1:
            edges = low[dimension] + numpy.arange(parts + 1, dtype=numpy.int64) * extent // parts
            cut: list[tuple[Integers, Integers]] = []
            for begin, end in pieces:
                for part in range(parts):
                    part_low, part_high = begin.copy(), end.copy()
                    part_low[dimension], part_high[dimension] = edges[part], edges[part + 1]
                    cut.append((part_low, part_high))
            pieces = cut
        if inner <= limit:
            break
    return numpy.stack([part[0] for part in pieces]), numpy.stack([part[1] for part in pieces])
