"""Builds a `ClusterLayout` column by column, for layouts of hundreds of thousands of slices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
from numpy.typing import ArrayLike, NDArray

from weightplane.cluster_layout import ClusterLayout
from weightplane.dtypes import elements_per_byte, item_bytes
from weightplane.errors import LayoutError
from weightplane.layout import ALIGNMENT, TensorSpec
from weightplane.slice_table import SliceTable, StorageTable, padded

__all__ = ["LayoutColumns"]

_COLUMNS = ("rank", "tensor", "storage", "start", "shape", "offset", "strides")


class LayoutColumns:
    """Collects tensors, and storages with their slices on many ranks at once.

    Args:
        ranks: names of the ranks.
        dimensions: the most dimensions that a tensor has.
    """

    def __init__(self, ranks: Sequence[str], dimensions: int) -> None:
        self._ranks = tuple(ranks)
        self._dimensions = dimensions
        self._specs: list[TensorSpec] = []
        self._ends = numpy.zeros(len(self._ranks), numpy.int64)
        self._storage_names: list[str] = []
        self._storages: list[NDArray[numpy.int64]] = []
        self._columns: dict[str, list[NDArray[numpy.int64]]] = {name: [] for name in _COLUMNS}

    def tensor(self, name: str, shape: tuple[int, ...], dtype: str) -> int:
        """Add a logical tensor; returns its number."""
        self._specs.append(TensorSpec(name, shape, dtype))
        return len(self._specs) - 1

    def storage(
        self,
        name: str,
        ranks: Sequence[int] | NDArray[numpy.int64],
        byte_count: int,
        tensors: ArrayLike,
        start: ArrayLike,
        shape: ArrayLike,
        offset: ArrayLike,
        strides: ArrayLike,
        padding: ArrayLike = 0,
    ) -> None:
        """Add one storage to each of ``ranks``, with the same number of slices on each.

        Args:
            name: the same on every rank.
            ranks: int [r].
            byte_count: of the storage.
            tensors: numbers, broadcast to [r, n].
            start, shape, strides: in items and bytes, broadcast to [r, n, dimensions].
            offset: bytes into the storage, broadcast to [r, n].
            padding: bytes that no slice fills, broadcast to [r].
        """
        at = numpy.asarray(ranks, numpy.int64)
        tensors, offset = numpy.asarray(tensors, numpy.int64), numpy.asarray(offset, numpy.int64)
        size = numpy.broadcast_shapes(tensors.shape, offset.shape, (len(at), 1))
        begin = self._ends[at]
        self._ends[at] = -(-(begin + byte_count) // ALIGNMENT) * ALIGNMENT
        first = len(self._storage_names)
        self._storage_names += [name] * len(at)
        spare = numpy.broadcast_to(numpy.asarray(padding, numpy.int64), at.shape)
        self._storages.append(
            numpy.stack([at, begin, numpy.full(len(at), byte_count), spare], axis=1)
        )
        row = numpy.arange(len(at))[:, None]
        narrow = {
            "rank": at[:, None],
            "tensor": tensors,
            "storage": row + first,
            "offset": begin[:, None] + offset,
        }
        for column, values in narrow.items():
            self._columns[column].append(numpy.broadcast_to(values, size).reshape(-1))
        for column, values in (("start", start), ("shape", shape), ("strides", strides)):
            wide = numpy.broadcast_to(numpy.asarray(values, numpy.int64), (*size, self._dimensions))
            self._columns[column].append(wide.reshape(-1, self._dimensions))

    def whole(self, name: str, ranks: Sequence[int] | NDArray[numpy.int64], tensor: int) -> None:
        """Add a storage that is one whole tensor to each of ``ranks``."""
        spec = self._specs[tensor]
        item = item_bytes(spec.dtype)
        shape = list(spec.shape)
        if elements_per_byte(spec.dtype) > 1:
            shape[-1] //= 2
        box = padded([tuple(shape)], self._dimensions, 1)[0]
        strides = numpy.append(numpy.cumprod(box[::-1])[::-1][1:], 1) * item
        self.storage(
            name, ranks, int(box.prod()) * item, tensor, 0, box, 0, numpy.where(box > 1, strides, 0)
        )

    def layout(self) -> ClusterLayout:
        """What was collected.

        Raises:
            LayoutError: nothing was, or it is no valid layout.
        """
        if not self._storages:
            raise LayoutError("a layout needs at least one tensor: an empty update updates nothing")
        column = {name: numpy.concatenate(parts) for name, parts in self._columns.items()}
        order = sorted(range(len(self._specs)), key=lambda number: self._specs[number].name)
        position = numpy.empty(len(order), numpy.int64)
        position[order] = numpy.arange(len(order))
        storages = numpy.concatenate(self._storages)
        table = SliceTable(
            column["rank"], position[column["tensor"]], column["storage"], column["start"],
            column["shape"], numpy.ones_like(column["start"]), column["offset"], column["strides"],
        )  # fmt: skip
        return ClusterLayout(
            tuple(self._specs[number] for number in order),
            self._ranks,
            StorageTable(tuple(self._storage_names), *storages.T),
            table,
        )
