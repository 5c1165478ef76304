"""The slices and storages of many ranks as columns of integers.

A cluster of a trillion-parameter model has half a million slices; as Python objects they would take
longer to make than the whole plan. One row is one slice, all in *items*: an item is an element, or
a byte that holds two four-bit elements. Tensors of fewer dimensions have leading dimensions of
extent 1, so that every row has the same number of columns.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy

from weightplane.errors import LayoutError

__all__ = ["SliceTable", "StorageTable", "padded"]


def padded(rows: list[tuple[int, ...]], dimensions: int, fill: int) -> numpy.ndarray:
    """Rows of at most ``dimensions`` integers as int64 [rows, dimensions], filled at the front."""
    return numpy.array(
        [(fill,) * (dimensions - len(row)) + tuple(row) for row in rows], numpy.int64
    ).reshape(len(rows), dimensions)


@dataclass(frozen=True, eq=False)
class SliceTable:
    """Strided boxes of logical tensors and the strided places that hold them.

    Attributes:
        rank: int32 [slices], the holder.
        tensor: int32 [slices], index of the logical tensor.
        storage: int32 [slices], row of the storage table.
        start, shape, step: int64 [slices, dimensions], the box: items ``start + i * step``.
        offset: int64 [slices], byte of the first item in the rank's arena.
        strides: int64 [slices, dimensions], bytes from one item of the box to the next.
    """

    rank: numpy.ndarray
    tensor: numpy.ndarray
    storage: numpy.ndarray
    start: numpy.ndarray
    shape: numpy.ndarray
    step: numpy.ndarray
    offset: numpy.ndarray
    strides: numpy.ndarray

    def __post_init__(self) -> None:
        _freeze(self)

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def dimensions(self) -> int:
        """Columns of a box."""
        return self.start.shape[1]

    def take(self, rows: numpy.ndarray) -> SliceTable:
        """The rows ``rows``, in that order."""
        return SliceTable(*(getattr(self, field.name)[rows] for field in fields(self)))

    def widened(self, dimensions: int) -> SliceTable:
        """The same slices with leading dimensions of extent 1 added."""
        extra = dimensions - self.dimensions
        if extra == 0:
            return self

        def front(values: numpy.ndarray, fill: int) -> numpy.ndarray:
            return numpy.pad(values, ((0, 0), (extra, 0)), constant_values=fill)

        return SliceTable(
            self.rank, self.tensor, self.storage, front(self.start, 0), front(self.shape, 1),
            front(self.step, 1), self.offset, front(self.strides, 0),
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class StorageTable:
    """The local tensors of every rank, each a contiguous range of its rank's arena.

    Attributes:
        names: the engine's own name of each storage.
        rank: int32 [storages].
        offset, byte_count, padding_bytes: int64 [storages].
    """

    names: tuple[str, ...]
    rank: numpy.ndarray
    offset: numpy.ndarray
    byte_count: numpy.ndarray
    padding_bytes: numpy.ndarray

    def __post_init__(self) -> None:
        _freeze(self)

    def __len__(self) -> int:
        return len(self.names)

    def take(self, rows: numpy.ndarray) -> StorageTable:
        """The rows ``rows``, in that order."""
        names = tuple(self.names[row] for row in rows.tolist())
        columns = (self.rank, self.offset, self.byte_count, self.padding_bytes)
        return StorageTable(names, *(column[rows] for column in columns))


_NARROW = ("rank", "tensor", "storage")


def _freeze(table: SliceTable | StorageTable) -> None:
    """Give every column its one dtype and make it read-only."""
    for field in fields(table):
        column = getattr(table, field.name)
        if not isinstance(column, numpy.ndarray):
            continue
        if column.dtype.kind not in "iu":
            raise LayoutError(f"column {field.name} has dtype {column.dtype}: use integers")
        dtype = numpy.int32 if field.name in _NARROW else numpy.int64
        column = numpy.ascontiguousarray(column, dtype).view()
        column.flags.writeable = False
        object.__setattr__(table, field.name, column)
