"""The ways in which ranks cut, fuse, interleave, replicate and pad tensors.

`RankBuilder` collects what one rank holds; every method adds one storage. What is held is described
for any rank of any size, so pipeline and expert parallelism need no method of their own: a rank
adds the layers and experts that it has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from weightplane.dtypes import elements_per_byte, item_bytes, packed_bytes
from weightplane.errors import LayoutError
from weightplane.layout import ALIGNMENT, TensorSpec
from weightplane.slices import RankLayout, Slice, Storage, contiguous_strides

__all__ = ["RankBuilder", "chunk", "even_share", "flat_range"]


def even_share(extent: int, rank: int, size: int, what: str) -> tuple[int, int]:
    """Begin and end of the share of ``rank``.

    Raises:
        LayoutError: ``size`` does not divide ``extent``.
    """
    if not 0 <= rank < size:
        raise LayoutError(f"rank is {rank}, but there are {size}")
    if extent % size:
        raise LayoutError(f"{what} has extent {extent}, which {size} ranks do not divide evenly")
    share = extent // size
    return rank * share, (rank + 1) * share


def chunk(extent: int, rank: int, size: int) -> tuple[int, int]:
    """Begin and end of a share by the rule of `torch.chunk`: full shares first, then less or none.

    It is how DTensor and FSDP2 cut what does not divide.
    """
    share = -(-extent // size)
    return min(rank * share, extent), min((rank + 1) * share, extent)


def flat_range(
    shape: Sequence[int], start: int, stop: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes (start, shape) that make up elements ``start`` to ``stop`` of a flattened tensor.

    FSDP1 and Megatron's distributed optimizer cut flattened tensors. The boxes come in the order of
    the elements, each row-major, so they lie one after the other in the flat shard.
    """
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    inner = math.prod(shape[1:])
    first, last = start // inner, (stop - 1) // inner
    whole = (0,) * (len(shape) - 1), tuple(shape[1:])
    begin = start - first * inner
    if first == last:
        end = stop - first * inner
        if begin == 0 and end == inner:
            return [((first, *whole[0]), (1, *whole[1]))]
        parts = flat_range(shape[1:], begin, end)
        return [((first, *low), (1, *extent)) for low, extent in parts]
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    if begin:
        boxes += flat_range(shape, start, (first + 1) * inner)
        first += 1
    end = stop - last * inner
    complete = last + (end == inner) - first
    if complete:
        boxes.append(((first, *whole[0]), (complete, *whole[1])))
    if end != inner:
        boxes += flat_range(shape, last * inner, stop)
    return boxes


class RankBuilder:
    """What one rank holds.

    Args:
        name: of the rank.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._storages: list[Storage] = []
        self._slices: list[Slice] = []
        self._specs: dict[str, TensorSpec] = {}
        self._end = 0

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Every logical tensor that was named."""
        return tuple(self._specs.values())

    def layout(self) -> RankLayout:
        """What was collected."""
        return RankLayout(self._name, tuple(self._storages), tuple(self._slices))

    def add(
        self, name: str, byte_count: int, pieces: Sequence[Slice], specs: Sequence[TensorSpec],
        padding_bytes: int = 0,
    ) -> None:  # fmt: skip
        """Add a storage with slices that are spelled out."""
        for spec in specs:
            if self._specs.setdefault(spec.name, spec) != spec:
                raise LayoutError(f"{spec.name!r} is {spec} here and {self._specs[spec.name]}")
        offset = -(-self._end // ALIGNMENT) * ALIGNMENT
        self._end = offset + byte_count
        self._storages.append(Storage(name, offset, byte_count, padding_bytes))
        self._slices += pieces

    def box(
        self, spec: TensorSpec, start: Sequence[int], shape: Sequence[int], name: str = ""
    ) -> None:
        """A box, contiguous in a storage of its own (called like the tensor by default)."""
        name = name or spec.name
        piece = Slice(spec.name, tuple(start), tuple(shape), name)
        self.add(name, packed_bytes(shape, spec.dtype), [piece], [spec])

    def whole(self, spec: TensorSpec) -> None:
        """All of a tensor: norms, biases that are not cut, fp32 islands, buffers."""
        self.box(spec, (0,) * len(spec.shape), spec.shape)

    def cut(self, spec: TensorSpec, dim: int, rank: int, size: int) -> None:
        """An even share along one dimension: 0 is column parallel, 1 row parallel."""
        begin, end = even_share(spec.shape[dim], rank, size, spec.name)
        start, shape = [0] * len(spec.shape), list(spec.shape)
        start[dim], shape[dim] = begin, end - begin
        self.box(spec, start, shape)

    def flat(self, spec: TensorSpec, start: int, stop: int, name: str = "") -> None:
        """Elements ``start`` to ``stop`` of the flattened tensor, in a flat storage."""
        name, at = name or spec.name, 0
        if elements_per_byte(spec.dtype) > 1:
            raise LayoutError(f"{spec.name!r} is {spec}: packed weights are not cut flat")
        pieces: list[Slice] = []
        for low, shape in flat_range(spec.shape, start, stop):
            pieces.append(Slice(spec.name, low, shape, name, at))
            at += packed_bytes(shape, spec.dtype)
        self.add(name, at, pieces, [spec])

    def rows(
        self, name: str, parts: Sequence[tuple[TensorSpec, int, int]], padding_rows: int = 0
    ) -> None:
        """Rows of several tensors of one width under one another: fused gate and up, fused QKV.

        Args:
            name: of the storage.
            parts: (tensor, first row, end row); a tensor may come more than once.
            padding_rows: rows below them that nobody fills.
        """
        pieces: list[Slice] = []
        at = 0
        width, dtype = parts[0][0].shape[1:], parts[0][0].dtype
        for spec, begin, end in parts:
            if (spec.shape[1:], spec.dtype) != (width, dtype):
                raise LayoutError(f"{spec.name!r} is {spec}, which does not fit into {name!r}")
            inner = (0,) * len(width)
            pieces.append(Slice(spec.name, (begin, *inner), (end - begin, *width), name, at))
            at += packed_bytes((end - begin, *width), dtype)
        padding = packed_bytes((padding_rows, *width), dtype)
        self.add(name, at + padding, pieces, [part[0] for part in parts], padding)

    def gate_up(
        self, name: str, gate: TensorSpec, up: TensorSpec, rank: int, size: int, interleaved: bool
    ) -> None:
        """Shares of gate and up: one under the other, or row by row in turn."""
        begin, end = even_share(gate.shape[0], rank, size, gate.name)
        if not interleaved:
            self.rows(name, [(gate, begin, end), (up, begin, end)])
            return
        row = packed_bytes((1, *gate.shape[1:]), gate.dtype)
        items = list(gate.shape[1:])
        if items and elements_per_byte(gate.dtype) > 1:
            items[-1] //= 2
        strides = (2 * row, *contiguous_strides(items, item_bytes(gate.dtype)))
        shape, start = (end - begin, *gate.shape[1:]), (begin, *(0 for _ in gate.shape[1:]))
        pieces = [
            Slice(spec.name, start, shape, name, number * row, strides)
            for number, spec in enumerate((gate, up))
        ]
        self.add(name, 2 * (end - begin) * row, pieces, [gate, up])

    def qkv(
        self, name: str, query: TensorSpec, key: TensorSpec, value: TensorSpec, head: int,
        rank: int, size: int, grouped: bool,
    ) -> None:  # fmt: skip
        """Heads of query, key and value in one storage; biases have one dimension.

        With fewer key-value heads than ranks, neighbours hold the same head.

        Args:
            head: rows of one head.
            grouped: each key-value head after its query heads, as Megatron has it; otherwise all
                query heads, all keys, all values.
        """
        groups = key.shape[0] // head
        begin, end = even_share(query.shape[0] // head, rank, size, f"heads of {query.name}")
        if groups % size and size % groups:
            raise LayoutError(f"{key.name!r} has {groups} heads, which {size} ranks cannot share")
        first = rank * groups // size
        last = max(first + 1, (rank + 1) * groups // size)
        if not grouped:
            heads = (first * head, last * head)
            self.rows(name, [(query, begin * head, end * head), (key, *heads), (value, *heads)])
            return
        share = (end - begin) // (last - first)
        parts: list[tuple[TensorSpec, int, int]] = []
        for number, group in enumerate(range(first, last)):
            low = begin + number * share
            parts.append((query, low * head, (low + share) * head))
            parts += [(spec, group * head, (group + 1) * head) for spec in (key, value)]
        self.rows(name, parts)

    def vocabulary(self, spec: TensorSpec, rank: int, size: int, padded_rows: int) -> None:
        """A share of the rows of a table that is padded to ``padded_rows`` in total.

        Padding belongs to this side alone: it is neither sent nor received, but zeroed.
        """
        if padded_rows < spec.shape[0]:
            raise LayoutError(f"{spec.name!r} has {spec.shape[0]} rows, padded are {padded_rows}")
        begin, end = even_share(padded_rows, rank, size, f"padded {spec.name}")
        real = max(begin, min(end, spec.shape[0]))
        begin = min(begin, real)
        self.rows(spec.name, [(spec, begin, real)], padded_rows // size - (real - begin))
