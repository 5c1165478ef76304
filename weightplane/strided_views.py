"""Which elements of a row-major tensor a strided view names."""

from __future__ import annotations

import math
from dataclasses import dataclass

from weightplane.errors import LayoutError

__all__ = ["Match", "row_major", "view_as_boxes"]


@dataclass(frozen=True, slots=True)
class Match:
    """A box of one tensor and the strided place that its elements correspond to.

    Attributes:
        start, shape, step: the box, per dimension of the tensor.
        offset: element at the other side that belongs to the first element of the box.
        strides: elements at the other side, per dimension of the tensor.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    step: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a contiguous tensor."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def view_as_boxes(
    shape: tuple[int, ...], sizes: tuple[int, ...], offset: int, strides: tuple[int, ...],
    other_offset: int, other_strides: tuple[int, ...],
) -> list[Match]:  # fmt: skip
    """Describe a view of a row-major tensor by boxes, and carry another view of equal size along.

    Args:
        shape: of the tensor.
        sizes: of both views.
        offset, strides: of the view into the tensor, in elements.
        other_offset, other_strides: of the other view, in its own elements.

    Returns:
        Disjoint boxes; usually one, more where one dimension of the tensor is visited by several
        dimensions of the view in an order that no step describes.

    Raises:
        LayoutError: the view repeats elements, or straddles dimensions in a way that no boxes with
            steps describe.
    """
    if 0 in sizes:
        return []
    axes = [axis for axis in zip(sizes, strides, other_strides, strict=True) if axis[0] > 1]
    own = row_major(shape)
    start = [offset // own[d] % shape[d] for d in range(len(shape))]
    pending, found = axes[::-1], dict[int, list[tuple[int, int, int]]]()
    while pending:
        size, stride, other = pending.pop()
        d = _dimension(shape, own, stride)
        step = stride // own[d]
        room = shape[d] - start[d]
        if (size - 1) * step < room:
            found.setdefault(d, []).append((size, step, other))
            continue
        # The axis runs over the end of the dimension: into whole rows of the next one outside.
        if step != 1 or start[d] or size % shape[d] or d == 0:
            raise LayoutError(
                f"a view of sizes {sizes} and strides {strides} at {offset} of a tensor {shape} "
                "straddles its rows"
            )
        inner = shape[d]
        pending.append((inner, stride, other))
        pending.append((size // inner, stride * inner, other * inner))
    return _combine(shape, start, found, other_offset)


def _dimension(shape: tuple[int, ...], own: tuple[int, ...], stride: int) -> int:
    if stride <= 0:
        raise LayoutError(f"a view with stride {stride} repeats elements")
    for d in range(len(shape)):
        if shape[d] > 1 and own[d] <= stride and stride % own[d] == 0:
            return d
    raise LayoutError(f"a view with stride {stride} fits no dimension of a tensor {shape}")


def _combine(
    shape: tuple[int, ...], start: list[int], found: dict[int, list[tuple[int, int, int]]],
    other_offset: int,
) -> list[Match]:  # fmt: skip
    """One axis per dimension: axes that continue each other are joined, others enumerated."""
    boxes = [(list(start), [1] * len(shape), [1] * len(shape), other_offset, [0] * len(shape))]
    for d, axes in found.items():
        axes = sorted(axes, key=lambda axis: axis[1])
        size, step, other = axes[0]
        rest: list[tuple[int, int, int]] = []
        for next_size, next_step, next_other in axes[1:]:
            if not rest and next_step == size * step and next_other == size * other:
                size *= next_size
            else:
                rest.append((next_size, next_step, next_other))
        reach = start[d] + (size - 1) * step + sum((n - 1) * by for n, by, _ in rest)
        if reach >= shape[d]:
            raise LayoutError(f"a view reaches element {reach} of a dimension of {shape[d]}")
        for _, extent, by, _, jumps in boxes:
            extent[d], by[d], jumps[d] = size, step, other
        for next_size, next_step, next_other in rest:
            grown = []
            for begin, extent, by, place, jumps in boxes:
                for number in range(next_size):
                    moved = list(begin)
                    moved[d] += number * next_step
                    grown.append(
                        (moved, list(extent), list(by), place + number * next_other, list(jumps))
                    )
            boxes = grown
    return [
        Match(tuple(begin), tuple(extent), tuple(by), place, tuple(jumps))
        for begin, extent, by, place, jumps in boxes
    ]
