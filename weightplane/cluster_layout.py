"""What all ranks of one side hold: the trainer's, or those of all rollout replicas.

A logical tensor is what both sides agree on: a name, a shape without padding, a dtype. A rank holds
`Slice`s of logical tensors inside `Storage`s, its own local tensors: a fused QKV weight is one
storage with slices of three tensors, a stacked expert weight one with slices of many. A slice is a
strided box on both ends, so row, column and interleaved sharding, transposes, fused and stacked
tensors are all the same thing. The storages of a rank lie in one arena of bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import msgspec
import numpy

from weightplane.dtypes import elements_per_byte, item_bytes
from weightplane.errors import LayoutError
from weightplane.layout import ALIGNMENT, Layout, TensorSpec
from weightplane.slice_table import SliceTable, StorageTable, padded
from weightplane.slices import RankLayout, Slice, Storage, contiguous_strides, in_items

__all__ = ["ClusterLayout", "RankLayout", "Slice", "Storage", "contiguous_strides"]


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    tensors: tuple[TensorSpec, ...]
    ranks: tuple[RankLayout, ...]
    ties: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, eq=False)
class ClusterLayout:
    """Every slice of every rank of one side.

    Attributes:
        tensors: logical tensors, sorted by name.
        ranks: names of the ranks; the index is the rank's number.
        storage_table: sorted by rank, then offset.
        slice_table: sorted by rank, then offset.
        ties: pairs (alias, name): the alias is not held, it is the tensor ``name``.
    """

    tensors: tuple[TensorSpec, ...]
    ranks: tuple[str, ...]
    storage_table: StorageTable
    slice_table: SliceTable
    ties: tuple[tuple[str, str], ...] = field(default=())

    def __post_init__(self) -> None:
        names = [spec.name for spec in self.tensors]
        if not names:
            raise LayoutError("a layout needs at least one tensor: an empty update updates nothing")
        if names != sorted(set(names)):
            raise LayoutError("the tensors of a layout must be sorted by name, each name once")
        if not self.ranks or len(set(self.ranks)) != len(self.ranks) or not all(self.ranks):
            raise LayoutError("a layout needs ranks with distinct names that are not empty")
        known = set(names)
        for alias, name in self.ties:
            if alias in known or name not in known:
                raise LayoutError(
                    f"{alias!r} is tied to {name!r}: the second must be a tensor of the layout, "
                    "and the first must not"
                )
        storages, slices = self.storage_table, self.slice_table
        rows = numpy.lexsort((storages.offset, storages.rank))
        position = numpy.empty(len(rows), numpy.int64)
        position[rows] = numpy.arange(len(rows))
        object.__setattr__(self, "storage_table", storages.take(rows))
        order = numpy.lexsort((slices.tensor, slices.offset, slices.rank))
        slices = slices.take(order)
        slices = replace(slices, storage=position[slices.storage])
        object.__setattr__(self, "slice_table", slices)
        object.__setattr__(self, "ties", tuple(sorted(self.ties)))
        self._check_storages()
        self._check_slices()

    @classmethod
    def build(
        cls,
        tensors: Sequence[TensorSpec],
        ranks: Sequence[RankLayout],
        ties: Mapping[str, str] | None = None,
    ) -> ClusterLayout:
        """A layout from descriptions of its ranks; slices without elements are left out.

        Raises:
            LayoutError: a slice names no tensor or storage of the layout, does not lie inside
                them, or cuts a byte of two elements in half.
        """
        ordered = tuple(sorted(tensors, key=lambda spec: spec.name))
        number = {spec.name: index for index, spec in enumerate(ordered)}
        dimensions = max((len(spec.shape) for spec in ordered), default=0)
        storage_rows: list[tuple[int, Storage]] = []
        columns: list[tuple[int, int, int, int]] = []
        boxes: list[tuple[tuple[int, ...], ...]] = []
        for rank, description in enumerate(ranks):
            places = {
                storage.name: len(storage_rows) + index
                for index, storage in enumerate(description.storages)
            }
            if len(places) != len(description.storages):
                raise LayoutError(f"rank {description.name!r} names a storage twice")
            storage_rows += [(rank, storage) for storage in description.storages]
            for piece in description.slices:
                place = places.get(piece.storage)
                index = number.get(piece.tensor)
                if place is None or index is None:
                    raise LayoutError(
                        f"rank {description.name!r} has a slice of {piece.tensor!r} in storage "
                        f"{piece.storage!r}, which the layout does not name"
                    )
                if 0 in piece.shape:
                    continue
                boxes.append(in_items(piece, ordered[index], description.name))
                offset = storage_rows[place][1].offset + piece.offset
                columns.append((rank, index, place, offset))
        storages = StorageTable(
            tuple(storage.name for _, storage in storage_rows),
            numpy.array([rank for rank, _ in storage_rows], numpy.int32),
            *(
                numpy.array([getattr(storage, name) for _, storage in storage_rows], numpy.int64)
                for name in ("offset", "byte_count", "padding_bytes")
            ),
        )
        column = numpy.array(columns, numpy.int64).reshape(len(columns), 4)
        start, shape, step, strides = (
            padded([box[part] for box in boxes], dimensions, fill)
            for part, fill in ((0, 0), (1, 1), (2, 1), (3, 0))
        )
        slices = SliceTable(
            column[:, 0], column[:, 1], column[:, 2], start, shape, step, column[:, 3], strides
        )
        names = tuple(description.name for description in ranks)
        return cls(ordered, names, storages, slices, tuple((ties or {}).items()))

    @classmethod
    def of_layouts(cls, layouts: Mapping[str, Layout]) -> ClusterLayout:
        """The layout of ranks that hold unfused, contiguous shards; one storage per shard."""
        specs: dict[str, TensorSpec] = {}
        ranks: list[RankLayout] = []
        for rank, layout in layouts.items():
            for spec in layout.tensors:
                if specs.setdefault(spec.name, spec) != spec:
                    raise LayoutError(f"rank {rank!r} has {spec.name!r} as {spec}, another not")
            storages: list[Storage] = []
            slices: list[Slice] = []
            for number, shard in enumerate(layout.shards):
                name = f"{shard.tensor}#{number}"
                storages.append(Storage(name, shard.offset, layout.shard_bytes(shard)))
                slices.append(Slice(shard.tensor, shard.start, shard.shape, name))
            ranks.append(RankLayout(rank, tuple(storages), tuple(slices)))
        return cls.build(tuple(specs.values()), ranks)

    @classmethod
    def concatenate(cls, layouts: Sequence[ClusterLayout]) -> ClusterLayout:
        """All ranks of several layouts, for example of several rollout replicas, as one side."""
        specs = {spec.name: spec for layout in layouts for spec in layout.tensors}
        for layout in layouts:
            for spec in layout.tensors:
                if specs[spec.name] != spec:
                    raise LayoutError(f"{spec.name!r} is {spec} here and {specs[spec.name]} there")
        ties = {alias: name for layout in layouts for alias, name in layout.ties}
        ranks = [layout.rank_layout(rank) for layout in layouts for rank in range(layout.size)]
        return cls.build(tuple(specs.values()), ranks, ties)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.ranks)

    @cached_property
    def item_shapes(self) -> numpy.ndarray:
        """int64 [tensors, dimensions]: shapes in items, with leading extents of 1."""
        shapes = padded([spec.shape for spec in self.tensors], self.slice_table.dimensions, 1)
        shared = [elements_per_byte(spec.dtype) for spec in self.tensors]
        if shapes.shape[1]:
            shapes[:, -1] //= numpy.array(shared, numpy.int64)
        return shapes

    @cached_property
    def item_bytes(self) -> numpy.ndarray:
        """int64 [tensors]: bytes of an item of each tensor."""
        return numpy.array([item_bytes(spec.dtype) for spec in self.tensors], numpy.int64)

    @cached_property
    def arena_bytes(self) -> numpy.ndarray:
        """int64 [ranks]: bytes of each rank's arena, a multiple of `ALIGNMENT`."""
        ends = numpy.zeros(self.size, numpy.int64)
        table = self.storage_table
        numpy.maximum.at(ends, table.rank, table.offset + table.byte_count)
        return -(-ends // ALIGNMENT) * ALIGNMENT

    def storages(self, rank: int) -> tuple[Storage, ...]:
        """The storages of one rank, in the order of their offsets."""
        table = self.storage_table
        return tuple(
            Storage(
                table.names[row], int(table.offset[row]), int(table.byte_count[row]),
                int(table.padding_bytes[row]),
            )
            for row in numpy.flatnonzero(table.rank == rank).tolist()
        )  # fmt: skip

    def slices(self, rank: int) -> tuple[Slice, ...]:
        """The slices of one rank, in the order of their offsets."""
        return tuple(
            self.slice(row) for row in numpy.flatnonzero(self.slice_table.rank == rank).tolist()
        )

    def slice(self, row: int) -> Slice:
        """Row ``row`` of the slice table, in elements, with strides and steps spelled out."""
        table, storages = self.slice_table, self.storage_table
        spec = self.tensors[int(table.tensor[row])]
        first = table.dimensions - len(spec.shape)
        start, shape = table.start[row, first:].tolist(), table.shape[row, first:].tolist()
        if elements_per_byte(spec.dtype) > 1:
            start[-1] *= 2
            shape[-1] *= 2
        place = int(table.storage[row])
        return Slice(
            spec.name, tuple(start), tuple(shape), storages.names[place],
            int(table.offset[row] - storages.offset[place]),
            tuple(table.strides[row, first:].tolist()), tuple(table.step[row, first:].tolist()),
        )  # fmt: skip

    def rank_layout(self, rank: int) -> RankLayout:
        """One rank as a description."""
        return RankLayout(self.ranks[rank], self.storages(rank), self.slices(rank))

    @cached_property
    def digest(self) -> str:
        """32 hexadecimal digits over everything: equal digests mean equal layouts."""
        state = hashlib.blake2b(digest_size=16)
        header = (self.tensors, self.ranks, self.ties, self.storage_table.names)
        state.update(msgspec.json.encode(header))
        for table in (self.storage_table, self.slice_table):
            for name in table.__dataclass_fields__:
                column = getattr(table, name)
                if isinstance(column, numpy.ndarray):
                    state.update(column.astype(column.dtype.newbyteorder("<")).tobytes())
        return state.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClusterLayout) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def to_json(self) -> bytes:
        """Canonical JSON: the same bytes for the same layout, whoever writes it."""
        ranks = tuple(self.rank_layout(rank) for rank in range(self.size))
        return msgspec.json.encode(_Document(self.tensors, ranks, self.ties), order="sorted")

    @classmethod
    def from_json(cls, document: bytes) -> ClusterLayout:
        """Read what `to_json` wrote, or somebody by hand.

        Raises:
            LayoutError: the document is not JSON, has other fields, or describes no valid layout.
        """
        try:
            read = msgspec.json.decode(document, type=_Document)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise LayoutError(f"not a layout: {error}") from error
        return cls.build(read.tensors, read.ranks, dict(read.ties))

    def describe(self, row: int) -> str:
        """Slice ``row`` in words, for messages."""
        piece = self.slice(row)
        box = ", ".join(
            f"{start}:{start + (extent - 1) * step + 1}" + (f":{step}" if step > 1 else "")
            for start, extent, step in zip(piece.start, piece.shape, piece.step or (), strict=True)
        )
        rank = self.ranks[int(self.slice_table.rank[row])]
        return f"{piece.tensor}[{box}] in storage {piece.storage!r} of rank {rank!r}"

    def _check_storages(self) -> None:
        table = self.storage_table
        wrong = (table.offset % ALIGNMENT != 0) | (table.offset < 0) | (table.byte_count < 0)
        wrong |= (table.padding_bytes < 0) | (table.padding_bytes > table.byte_count)
        same = table.rank[1:] == table.rank[:-1]
        wrong[1:] |= same & (table.offset[1:] < table.offset[:-1] + table.byte_count[:-1])
        if wrong.any():
            row = int(wrong.argmax())
            raise LayoutError(
                f"storage {table.names[row]!r} of rank {self.ranks[table.rank[row]]!r} has offset "
                f"{table.offset[row]}, {table.byte_count[row]} bytes and {table.padding_bytes[row]}"
                f" bytes of padding: offsets are multiples of {ALIGNMENT}, storages do not overlap"
            )

    def _check_slices(self) -> None:
        table, storages = self.slice_table, self.storage_table
        last = table.start + (table.shape - 1) * table.step
        outside = (table.start < 0) | (table.step < 1) | (table.shape < 1)
        outside |= last >= self.item_shapes[table.tensor]
        self._refuse(outside, "is no box inside its tensor")
        self._refuse(
            (table.strides < 1) & (table.shape > 1),
            "has strides that are not positive: two elements share a byte",
        )
        end = table.offset + self.item_bytes[table.tensor]
        end = end + ((table.shape - 1) * table.strides).sum(axis=1)
        place = table.storage
        fits = (table.offset >= storages.offset[place]) & (
            end <= storages.offset[place] + storages.byte_count[place]
        )
        fits &= storages.rank[place] == table.rank
        self._refuse(~fits[:, None], "reaches beyond its storage")
        held = numpy.bincount(table.tensor, minlength=len(self.tensors)) > 0
        missing = ~held & (self.item_shapes.prod(axis=1) > 0)
        if missing.any():
            raise LayoutError(
                f"tensor {self.tensors[int(missing.argmax())].name!r} has no slice: leave out what "
                "is not held"
            )

    def _refuse(self, wrong: numpy.ndarray, reason: str) -> None:
        """Raise `LayoutError` for the first row of ``wrong``, bool [slices, n], that has a true."""
        if wrong.any():
            row = int(numpy.argwhere(wrong)[0, 0])
            raise LayoutError(f"{self.describe(row)} {reason}")
