"""A layout taken from an engine's own loader, by running it dry.

A loader knows how its engine fuses, stacks, transposes, replicates and pads; a table of names would
have to repeat all of it. `record_load` hands the loader weights without memory and watches, below
the loader, which view of which weight is copied into which view of which parameter. Views of any
kind are followed, and copies of copies (``clone``, ``cat``, ``stack``). Arithmetic on a weight is
an error: its result is not a slice, and no plan could deliver it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weightplane.dtypes import DTYPES
from weightplane.errors import LayoutError, RecordingError
from weightplane.layout import ALIGNMENT, TensorSpec
from weightplane.slices import RankLayout, Slice, Storage
from weightplane.strided_views import Match, row_major, view_as_boxes

__all__ = ["Recording", "record_load"]

Loader = Callable[[Iterator[tuple[str, torch.Tensor]]], object]

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Recording:
    """What a loader copied where.

    Attributes:
        tensors: the weights that were used, as logical tensors.
        storages, slices: of the rank.
        unused: weights that were offered and not copied anywhere.
    """

    tensors: tuple[TensorSpec, ...]
    storages: tuple[Storage, ...]
    slices: tuple[Slice, ...]
    unused: tuple[str, ...]

    def rank_layout(self, name: str) -> RankLayout:
        """The rank's layout, to be built into a `ClusterLayout` with the other ranks'."""
        return RankLayout(name, self.storages, self.slices)


def record_load(
    load: Loader,
    weights: Iterable[TensorSpec],
    parameters: Mapping[str, torch.Tensor],
    padded: Iterable[str] = (),
) -> Recording:
    """Run ``load`` on weights without memory and record what it copies.

    Args:
        load: the engine's loader: takes pairs of name and tensor. No parameter changes.
        weights: what the trainer offers, unpadded, in the dtypes that the engine keeps.
        parameters: the engine's parameters and buffers of this rank that are loaded, on any device.
        padded: parameters with elements that nobody loads and that are zero in the engine.
            Parameters that the loader itself zeroes need not be named.

    Raises:
        RecordingError: the loader computes with a weight, converts its dtype, changes a parameter
            in another way, or leaves a parameter unloaded.
    """
    watcher = _Watcher(dict(parameters))
    with watcher:
        load(watcher.offer(weights))
    return watcher.recording(set(padded))


@dataclass(frozen=True, slots=True)
class _Piece:
    """A box of a copy, and the elements of a weight that it holds."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    weight: str
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Copy:
    """A tensor that holds weights, itself no parameter: the weight as offered, or a copy."""

    tensor: torch.Tensor
    pieces: tuple[_Piece, ...]


@dataclass(frozen=True, slots=True)
class _Write:
    """Elements of a weight that lie in a parameter: sizes, and offset and strides on either end."""

    weight: str
    parameter: str
    sizes: tuple[int, ...]
    weight_offset: int
    weight_strides: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Watcher(TorchDispatchMode):
    def __init__(self, parameters: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._parameters = parameters
        self._storages = {name: tensor.untyped_storage() for name, tensor in parameters.items()}
        self._owners: dict[int, str] = {}
        for name, tensor in parameters.items():
            self._owners.setdefault(_key(tensor), name)
        self._specs: dict[str, TensorSpec] = {}
        self._copies: dict[int, _Copy] = {}
        self._writes: list[_Write] = []
        self._zeroed: set[str] = set()

    def offer(self, weights: Iterable[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
        for spec in weights:
            tensor = torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device="meta")
            if spec.name in self._specs or tuple(tensor.shape) != spec.shape:
                raise RecordingError(f"{spec.name!r} ({spec}) is offered twice, or has no tensor")
            self._specs[spec.name] = spec
            whole = _Piece((0,) * len(spec.shape), spec.shape, spec.name, 0, row_major(spec.shape))
            self._copies[_key(tensor)] = _Copy(tensor, (whole,))
            yield spec.name, tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        operands = [*_tensors(args), *_tensors(kwargs.values())]
        target = operands[0] if func._schema.is_mutable and operands else None
        owner = self._owners.get(_key(target)) if target is not None else None
        sources = [tensor for tensor in operands if _key(tensor) in self._copies]
        if func is _aten.copy_.default:
            if owner is not None:
                self._write(args[0], args[1], owner)
                return args[0]
            if sources:
                return self._fill_copy(args[0], args[1])
        elif owner is not None:
            zero = func is _aten.zero_.default or (
                func in (_aten.fill_.Scalar,) and float(args[1]) == 0.0
            )
            if not zero:
                raise RecordingError(f"the loader changes parameter {owner!r} by {func}, no copy")
            self._zeroed.add(owner)
            return args[0]
        elif sources and func in (_aten.clone.default, _aten._to_copy.default):
            return self._joined(func(*args, **kwargs), [(args[0], 0)], 0, func)
        elif sources and func in (_aten.cat.default, _aten.stack.default):
            return self._concatenated(func, args, kwargs)
        result = func(*args, **kwargs)
        if sources:
            known = {_key(tensor) for tensor in sources}
            for tensor in _tensors([result]):
                if _key(tensor) not in known or func._schema.is_mutable:
                    raise RecordingError(
                        f"the loader computes {func} with {self._names(sources)}: only copies of "
                        "slices can be planned; do it once, at the trainer, or after the load"
                    )
        return result

    def _names(self, tensors: list[torch.Tensor]) -> str:
        pieces = [piece for tensor in tensors for piece in self._copies[_key(tensor)].pieces]
        return ", ".join(repr(name) for name in dict.fromkeys(piece.weight for piece in pieces))

    def _write(self, target: torch.Tensor, source: torch.Tensor, owner: str) -> None:
        if _key(source) not in self._copies:
            raise RecordingError(
                f"the loader fills parameter {owner!r} with a tensor that is no weight it was given"
            )
        source = source.expand(target.shape)
        if target.dtype != source.dtype:
            raise RecordingError(
                f"parameter {owner!r} is {target.dtype}, but {self._names([source])} is offered as "
                f"{source.dtype}: offer it in the dtype that the engine keeps"
            )
        for sizes, weight, offset, strides, place, jumps in self._elements(source, target):
            self._writes.append(_Write(weight, owner, sizes, offset, strides, place, jumps))

    def _elements(
        self, source: torch.Tensor, target: torch.Tensor
    ) -> Iterator[tuple[tuple[int, ...], str, int, tuple[int, ...], int, tuple[int, ...]]]:
        """Weights that a view of a copy holds, with the places they go to in ``target``."""
        copy = self._copies[_key(source)]
        count = 0
        for match in _views(copy.tensor, source, target):
            for piece in copy.pieces:
                common = _intersect(match, piece)
                if common is not None:
                    count += int(torch.Size(common[0]).numel())
                    yield common
        if count != target.numel():
            raise RecordingError(
                f"the loader copies {target.numel()} elements together with {self._names([source])}"
                f", of which {target.numel() - count} come from no weight"
            )

    def _fill_copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """A copy into a tensor of the loader's own: remember what it holds now."""
        base = target._base if target._base is not None else target
        if not base.is_contiguous() or _key(source) not in self._copies:
            raise RecordingError(f"the loader builds a copy of a weight in {tuple(base.shape)}")
        known = self._copies.get(_key(target), _Copy(base, ()))
        shape = tuple(known.tensor.shape)
        if target.dtype != source.dtype:
            raise RecordingError(f"the loader converts {self._names([source])} to {target.dtype}")
        pieces = list(known.pieces)
        for sizes, weight, offset, strides, place, jumps in self._elements(
            source.expand(target.shape), target
        ):
            for box in view_as_boxes(shape, sizes, place, jumps, offset, strides):
                if any(step > 1 for step in box.step):
                    raise RecordingError(f"the loader interleaves {weight!r} in a copy")
                pieces.append(_Piece(box.start, box.shape, weight, box.offset, box.strides))
        self._copies[_key(target)] = _Copy(known.tensor, tuple(pieces))
        return target

    def _concatenated(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> torch.Tensor:
        parts = list(args[0])
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        result = func(*args, **kwargs)
        dim %= result.dim()
        if func is _aten.stack.default:
            parts = [part.unsqueeze(dim) for part in parts]
        begins, at = [], 0
        for part in parts:
            begins.append((part, at))
            at += part.shape[dim] if part.dim() == result.dim() else 0
        return self._joined(result, begins, dim, func)

    def _joined(
        self, result: torch.Tensor, parts: list[tuple[torch.Tensor, int]], dim: int, func: Any
    ) -> torch.Tensor:
        """Register a new tensor whose box from ``begin`` along ``dim`` is each part."""
        plain = torch.empty(result.shape, dtype=result.dtype, device="meta")
        self._copies[_key(plain)] = _Copy(plain, ())
        for part, begin in parts:
            if part.numel() == 0:
                continue
            if _key(part) not in self._copies or part.dtype != result.dtype:
                raise RecordingError(
                    f"the loader computes {func} of a weight and another tensor or dtype "
                    f"({part.dtype} to {result.dtype}): only copies of slices can be planned"
                )
            end = begin + part.shape[dim] if part.dim() else 1
            place = plain.narrow(dim, begin, end - begin) if part.dim() else plain
            self._fill_copy(place, part)
        return plain

    def recording(self, padded: set[str]) -> Recording:
        unknown = padded - self._parameters.keys()
        if unknown:
            raise RecordingError(f"padded names {sorted(unknown)}, which are no parameters")
        self._take_replaced()
        storages: list[Storage] = []
        slices: list[Slice] = []
        end = 0
        for name in dict.fromkeys(self._owners.values()):
            parameter = self._parameters[name]
            item = parameter.element_size()
            byte_count = self._storages[name].nbytes()
            covered = 0
            for write in self._writes:
                if write.parameter != name:
                    continue
                shape = self._specs[write.weight].shape
                for box in view_as_boxes(
                    shape, write.sizes, write.weight_offset, write.weight_strides, write.offset,
                    write.strides,
                ):  # fmt: skip
                    strides = tuple(stride * item for stride in box.strides)
                    slices.append(
                        Slice(
                            write.weight, box.start, box.shape, name, box.offset * item, strides,
                            box.step,
                        )
                    )  # fmt: skip
                    covered += int(torch.Size(box.shape).numel()) * item
            padding = byte_count - covered
            if padding > 0 and name not in padded | self._zeroed:
                raise RecordingError(
                    f"the loader leaves {padding} of {byte_count} bytes of parameter {name!r} "
                    "unloaded: offer the weights that fill it, or name it in padded"
                )
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            storages.append(Storage(name, offset, byte_count, max(padding, 0)))
            end = offset + byte_count
        used = {piece.tensor for piece in slices}
        return Recording(
            tuple(spec for name, spec in self._specs.items() if name in used),
            tuple(storages),
            tuple(slices),
            tuple(name for name in self._specs if name not in used),
        )

    def _take_replaced(self) -> None:
        """Parameters whose data the loader replaced by a weight instead of copying it."""
        for name, parameter in self._parameters.items():
            if _key(parameter) in self._owners:
                continue
            if _key(parameter) not in self._copies:
                raise RecordingError(f"the loader replaces parameter {name!r} by no weight")
            owner = next(key for key, owned in self._owners.items() if owned == name)
            fresh = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            self._storages[name] = fresh.untyped_storage()
            self._owners[owner] = name
            self._write(fresh, parameter.detach(), name)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _views(base: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> list[Match]:
    try:
        return view_as_boxes(
            tuple(base.shape), tuple(source.shape), int(source.storage_offset()), source.stride(),
            int(target.storage_offset()), target.stride(),
        )  # fmt: skip
    except LayoutError as error:
        raise RecordingError(
            f"the loader copies a slice that no plan describes: {error}"
        ) from error


def _intersect(
    match: Match, piece: _Piece
) -> tuple[tuple[int, ...], str, int, tuple[int, ...], int, tuple[int, ...]] | None:
    """Elements of a box that lie in a piece: their sizes, weight, and both ends' places."""
    sizes, strides = [], []
    offset, place = piece.offset, match.offset
    for d in range(len(match.start)):
        start, step = match.start[d], match.step[d]
        first = max(0, -(-(piece.start[d] - start) // step))
        last = min(match.shape[d], -(-(piece.start[d] + piece.shape[d] - start) // step))
        if first >= last:
            return None
        sizes.append(last - first)
        strides.append(piece.strides[d] * step)
        offset += (start + first * step - piece.start[d]) * piece.strides[d]
        place += first * match.strides[d]
    return tuple(sizes), piece.weight, offset, tuple(strides), place, match.strides
