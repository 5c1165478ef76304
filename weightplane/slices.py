"""One slice, one storage, one rank: a layout as people write it and JSON holds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weightplane.dtypes import elements_per_byte, item_bytes
from weightplane.errors import LayoutError
from weightplane.layout import TensorSpec

__all__ = ["RankLayout", "Slice", "Storage", "contiguous_strides", "in_items"]


@dataclass(frozen=True, slots=True)
class Storage:
    """One local tensor of a rank: a contiguous range of its arena.

    Attributes:
        name: the engine's own name, unique in its rank.
        offset: bytes into the rank's arena, a multiple of `ALIGNMENT`.
        byte_count: bytes of the storage.
        padding_bytes: bytes that no slice covers on purpose (rows that pad the vocabulary); a
            receiver zeroes them. Bytes that are neither covered nor declared are an error.
    """

    name: str
    offset: int
    byte_count: int
    padding_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Slice:
    """A strided box of a logical tensor at a strided place of a storage.

    Attributes:
        tensor: the logical name.
        start, shape: the box, in elements of the logical tensor.
        storage: name of the storage.
        offset: bytes into the storage.
        strides: bytes from one element of the box to the next, per dimension; None means
            contiguous. Of nibbles the last entry is bytes from pair to pair.
        step: distance between elements of the box, per dimension; None means 1.
    """

    tensor: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    storage: str
    offset: int = 0
    strides: tuple[int, ...] | None = None
    step: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class RankLayout:
    """One rank: its name, its storages, its slices."""

    name: str
    storages: tuple[Storage, ...]
    slices: tuple[Slice, ...]


def contiguous_strides(shape: Sequence[int], item: int) -> tuple[int, ...]:
    """Bytes from one item to the next along each dimension of a row-major tensor."""
    strides: list[int] = []
    step = item
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def in_items(piece: Slice, spec: TensorSpec, rank: str) -> tuple[tuple[int, ...], ...]:
    """Start, shape, step and strides of a slice in items instead of elements."""
    step = piece.step if piece.step is not None else (1,) * len(piece.shape)
    lengths = {len(piece.start), len(piece.shape), len(step), len(spec.shape)}
    if piece.strides is not None:
        lengths.add(len(piece.strides))
    if len(lengths) != 1:
        raise LayoutError(
            f"rank {rank!r}: a slice of {spec.name!r} ({spec}) has start {piece.start}, shape "
            f"{piece.shape}, step {piece.step} and strides {piece.strides}: one entry per dimension"
        )
    start, shape = piece.start, piece.shape
    shared = elements_per_byte(spec.dtype)
    if shared > 1:
        if start[-1] % shared or shape[-1] % shared or step[-1] != 1:
            raise LayoutError(
                f"rank {rank!r}: the slice {start} + {shape} of {spec.name!r} ({spec}) cuts a byte "
                "of two elements in half: shard packed weights at even columns"
            )
        start = (*start[:-1], start[-1] // shared)
        shape = (*shape[:-1], shape[-1] // shared)
    strides = piece.strides
    if strides is None:
        strides = contiguous_strides(shape, item_bytes(spec.dtype))
    return start, shape, step, strides
