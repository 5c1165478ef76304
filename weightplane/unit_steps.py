"""Boxes with steps, relabelled so that planning meets only boxes without.

Where a slice takes every ``s``-th row, the rows of its tensor are renumbered: row ``q * f + r``
becomes ``r * ceil(n / f) + q``, with ``f`` the least common multiple of all steps of that dimension
on both sides. A box of step ``s`` is then ``f / s`` boxes of step 1, one per remainder ``r``.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy

from weightplane.boxes import Integers
from weightplane.slice_table import SliceTable

__all__ = ["common_steps", "in_original_rows", "relabelled"]


def common_steps(tables: tuple[SliceTable, ...], tensors: int, dimensions: int) -> Integers:
    """int64 [tensors, dimensions]: the least common multiple of the steps of all slices."""
    factors = numpy.ones((tensors, dimensions), numpy.int64)
    for table in tables:
        for row in numpy.flatnonzero((table.step != 1).any(axis=1)).tolist():
            tensor = int(table.tensor[row])
            if tensor < 0:
                continue
            for dimension in range(dimensions):
                step = int(table.step[row, dimension]) if table.shape[row, dimension] > 1 else 1
                factors[tensor, dimension] = math.lcm(int(factors[tensor, dimension]), step)
    return factors


def relabelled(table: SliceTable, factors: Integers, shapes: Integers) -> SliceTable:
    """``table`` with steps of 1 in renumbered rows; slices may become several.

    Args:
        table: its ``tensor`` column indexes ``factors`` and ``shapes``, or is negative.
        factors: int64 [tensors, dimensions], from `common_steps`.
        shapes: int64 [tensors, dimensions], extents in items.
    """
    if (factors == 1).all():
        return table
    stepped = (factors[table.tensor] > 1).any(axis=1) & (table.tensor >= 0)
    if not stepped.any():
        return table
    plain = numpy.flatnonzero(~stepped)
    origin: list[int] = plain.tolist()
    start, shape = list(table.start[plain]), list(table.shape[plain])
    offset, strides = table.offset[plain].tolist(), list(table.strides[plain])
    for row in numpy.flatnonzero(stepped).tolist():
        parts = [(table.start[row].copy(), table.shape[row].copy(), int(table.offset[row]),
                  table.strides[row].copy())]  # fmt: skip
        for dimension in range(table.dimensions):
            tensor = int(table.tensor[row])
            factor = int(factors[tensor, dimension])
            if factor == 1:
                continue
            per_remainder = -(-int(shapes[tensor, dimension]) // factor)
            first, count = int(table.start[row, dimension]), int(table.shape[row, dimension])
            step = int(table.step[row, dimension]) if count > 1 else factor
            stride = int(table.strides[row, dimension])
            ways = factor // step
            cut = []
            for low, extent, place, jumps in parts:
                for way in range(min(ways, count)):
                    quotient, remainder = divmod(first + way * step, factor)
                    new_low, new_extent, new_jumps = low.copy(), extent.copy(), jumps.copy()
                    new_low[dimension] = remainder * per_remainder + quotient
                    new_extent[dimension] = -(-(count - way) // ways)
                    new_jumps[dimension] = stride * ways
                    cut.append((new_low, new_extent, place + way * stride, new_jumps))
            parts = cut
        for low, extent, place, jumps in parts:
            origin.append(row)
            start.append(low)
            shape.append(extent)
            offset.append(place)
            strides.append(jumps)
    rows = numpy.array(origin, numpy.int64)
    taken = table.take(rows)
    result = replace(
        taken,
        start=numpy.stack(start),
        shape=numpy.stack(shape),
        step=numpy.ones_like(taken.step),
        offset=numpy.array(offset, numpy.int64),
        strides=numpy.stack(strides),
    )
    return result.take(numpy.lexsort((numpy.arange(len(rows)), rows)))


def in_original_rows(
    start: Integers, tensor: Integers, factors: Integers, shapes: Integers
) -> tuple[Integers, Integers]:
    """Start and step in the tensor's own rows of boxes in renumbered rows; both like ``start``."""
    if (factors == 1).all():
        return start, numpy.ones_like(start)
    factor = factors[tensor]
    per_remainder = -(-shapes[tensor] // factor)
    remainder, quotient = numpy.divmod(start, numpy.maximum(per_remainder, 1))
    return quotient * factor + remainder, factor
