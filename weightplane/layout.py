"""Who holds which slice of which tensor, and where in its flat buffer.

A `TensorSpec` names a tensor as the model knows it. A `Shard` is a box of that tensor, together
with the place of its bytes in the holder's flat buffer. A `Layout` is everything one holder has,
packed without fusing anything. Many ranks, fused and strided storage, padding and ties are what
`weightplane.cluster_layout` describes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import msgspec
import torch

from weightplane.dtypes import DTYPE_NAMES, DTYPES, elements_per_byte, packed_bytes
from weightplane.errors import LayoutError, LayoutMismatchError

ALIGNMENT = 64
"""Every shard starts at a multiple of this many bytes: a cache line, and any dtype's alignment."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A whole tensor as the model knows it: its name, its shape and its dtype (``"bfloat16"``)."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if not self.name:
            raise LayoutError("a tensor has an empty name: give every tensor a name")
        if any(extent < 0 for extent in self.shape):
            raise LayoutError(f"tensor {self.name!r} has a negative extent in shape {self.shape}")
        if self.dtype not in DTYPES:
            raise LayoutError(
                f"tensor {self.name!r} has dtype {self.dtype!r}; use one of {', '.join(DTYPES)}"
            )
        if elements_per_byte(self.dtype) > 1 and (not self.shape or self.shape[-1] % 2):
            raise LayoutError(
                f"tensor {self.name!r} has shape {self.shape} in {self.dtype}, two elements to a "
                "byte: the last extent must be even"
            )

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorSpec:
        """Describe ``tensor``.

        Raises:
            LayoutError: the tensor is sparse, or has a dtype that a layout cannot name.
        """
        if tensor.layout is not torch.strided:
            raise LayoutError(f"tensor {name!r} is {tensor.layout}; only dense tensors can be sent")
        dtype = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
        return cls(name, tuple(tensor.shape), dtype)

    @property
    def byte_count(self) -> int:
        """Bytes of the whole tensor, without padding."""
        return packed_bytes(self.shape, self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of one tensor and the place of its bytes.

    The box is ``[start[d], start[d] + shape[d])`` in every dimension ``d``; its elements lie
    contiguously, in row-major order, from byte ``offset`` of the holder's flat buffer.
    """

    tensor: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Layout:
    """The shards one holder has, all in one flat buffer.

    Attributes:
        tensors: the tensors that the shards belong to, sorted by name.
        shards: sorted by offset; boxes lie inside their tensor, byte ranges do not overlap.
        size: bytes of the flat buffer, padding included; a positive multiple of `ALIGNMENT`.
    """

    tensors: tuple[TensorSpec, ...]
    shards: tuple[Shard, ...]
    size: int

    def __post_init__(self) -> None:
        names = [spec.name for spec in self.tensors]
        if not names:
            raise LayoutError("a layout needs at least one tensor: an empty update updates nothing")
        if names != sorted(set(names)):
            raise LayoutError("the tensors of a layout must be sorted by name, each name once")
        specs = dict(zip(names, self.tensors, strict=True))
        end = 0
        for shard in self.shards:
            end = _check_shard(shard, specs, end)
        if {shard.tensor for shard in self.shards} != set(names):
            raise LayoutError("every tensor of a layout needs a shard: leave out what is not held")
        if self.size != _flat_size(end):
            raise LayoutError(f"size is {self.size}, but the shards need {_flat_size(end)} bytes")

    @classmethod
    def whole(cls, tensors: Iterable[TensorSpec]) -> Layout:
        """Every tensor whole, packed in the order of the names at 64-byte aligned offsets.

        The order of ``tensors`` does not matter, so two processes that know the same tensors get
        the same layout.
        """
        ordered = tuple(sorted(tensors, key=lambda spec: spec.name))
        shards: list[Shard] = []
        end = 0
        for spec in ordered:
            offset = _aligned(end)
            shards.append(Shard(spec.name, (0,) * len(spec.shape), spec.shape, offset))
            end = offset + spec.byte_count
        return cls(ordered, tuple(shards), _flat_size(end))

    @classmethod
    def of(cls, state: Mapping[str, torch.Tensor]) -> Layout:
        """The whole-tensor layout of ``state``; the values do not matter, only names and shapes."""
        return cls.whole(TensorSpec.of(name, tensor) for name, tensor in state.items())

    @property
    def is_whole(self) -> bool:
        """Whether every tensor is held by exactly one shard that covers it."""
        return len(self.shards) == len(self.tensors) and all(
            shard.shape == self.spec(shard.tensor).shape for shard in self.shards
        )

    @cached_property
    def byte_count(self) -> int:
        """Bytes of the shards, without padding."""
        return sum(self.shard_bytes(shard) for shard in self.shards)

    @cached_property
    def digest(self) -> str:
        """32 hexadecimal digits over the canonical JSON; equal digests mean equal layouts."""
        return hashlib.blake2b(self.to_json(), digest_size=16).hexdigest()

    @cached_property
    def _specs(self) -> dict[str, TensorSpec]:
        return {spec.name: spec for spec in self.tensors}

    def spec(self, name: str) -> TensorSpec:
        """The tensor called ``name``."""
        return self._specs[name]

    def shard_bytes(self, shard: Shard) -> int:
        """Bytes of ``shard``, without padding."""
        return packed_bytes(shard.shape, self.spec(shard.tensor).dtype)

    def to_json(self) -> bytes:
        """Canonical JSON: the same bytes for the same layout, whoever writes it."""
        document = {"tensors": self.tensors, "shards": self.shards, "size": self.size}
        return msgspec.json.encode(document, order="sorted")

    @classmethod
    def from_json(cls, document: bytes) -> Layout:
        """Read what `to_json` wrote.

        Raises:
            LayoutError: the document is not JSON, has other fields, or describes no valid layout.
        """
        try:
            return msgspec.json.decode(document, type=cls)
        except msgspec.DecodeError as error:
            raise LayoutError(f"not a layout: {error}") from error

    def check(self, state: Mapping[str, torch.Tensor]) -> None:
        """Make sure that ``state`` has exactly these tensors, with these shapes and dtypes.

        Raises:
            LayoutError: it has not; the message names the first tensors that differ and says how.
        """
        differences = _differences(
            self._specs, {name: TensorSpec.of(name, tensor) for name, tensor in state.items()}
        )
        if differences:
            raise LayoutError(f"the state does not fit the layout: {_summary(differences)}")

    def require_same(self, other: Layout, holder: str) -> None:
        """Make sure that ``other``, the layout of ``holder``, equals this one.

        Raises:
            LayoutMismatchError: it does not; the message names the first tensors that differ.
        """
        if self == other:
            return
        differences = _differences(self._specs, other._specs)
        summary = _summary(differences) if differences else "the shards lie in different places"
        raise LayoutMismatchError(f"{holder} has another layout: {summary}")

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Typed views of a flat buffer, one per shard, by tensor name.

        Args:
            flat: uint8 [size], contiguous, starting at a multiple of `ALIGNMENT`.

        Returns:
            Tensors that share storage with ``flat``. Defined for whole layouts.
        """
        tensors: dict[str, torch.Tensor] = {}
        for shard in self.shards:
            dtype = self.spec(shard.tensor).dtype
            piece = flat[shard.offset : shard.offset + self.shard_bytes(shard)]
            shape = shard.shape
            if elements_per_byte(dtype) > 1:
                shape = (*shape[:-1], shape[-1] // 2)
            tensors[shard.tensor] = piece.view(DTYPES[dtype]).view(shape)
        return tensors


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _flat_size(end: int) -> int:
    """Size of a flat buffer whose last shard ends at ``end``; never zero, it has to be mapped."""
    return max(_aligned(end), ALIGNMENT)


def _check_shard(shard: Shard, specs: Mapping[str, TensorSpec], end: int) -> int:
    """Check one shard against its tensor and the end of the shard before; returns its own end."""
    spec = specs.get(shard.tensor)
    if spec is None:
        raise LayoutError(f"a shard belongs to {shard.tensor!r}, which the layout does not name")
    inside = len(shard.start) == len(shard.shape) == len(spec.shape) and all(
        start >= 0 and extent >= 0 and start + extent <= whole
        for start, extent, whole in zip(shard.start, shard.shape, spec.shape, strict=True)
    )
    if not inside:
        raise LayoutError(
            f"a shard of {shard.tensor!r} has start {shard.start} and shape {shard.shape}, "
            f"which is no box inside {list(spec.shape)}"
        )
    if shard.offset < end or shard.offset % ALIGNMENT:
        raise LayoutError(
            f"a shard of {shard.tensor!r} has offset {shard.offset}; "
            f"it must be a multiple of {ALIGNMENT} and at least {end}"
        )
    if elements_per_byte(spec.dtype) > 1 and (shard.start[-1] % 2 or shard.shape[-1] % 2):
        raise LayoutError(
            f"a shard of {shard.tensor!r} has start {shard.start} and shape {shard.shape}, which "
            "cuts a byte of two elements in half"
        )
    return shard.offset + packed_bytes(shard.shape, spec.dtype)


def _differences(expected: Mapping[str, TensorSpec], actual: Mapping[str, TensorSpec]) -> list[str]:
    """One phrase per tensor that is missing, extra, or of another shape or dtype."""
    phrases: list[str] = []
    for name in sorted(expected.keys() | actual.keys()):
        if name not in actual:
            phrases.append(f"{name!r} is missing")
        elif name not in expected:
            phrases.append(f"{name!r} is extra")
        elif actual[name] != expected[name]:
            phrases.append(f"{name!r} is {actual[name]} instead of {expected[name]}")
    return phrases


def _summary(phrases: list[str], limit: int = 5) -> str:
    more = f" and {len(phrases) - limit} more" if len(phrases) > limit else ""
    return "; ".join(phrases[:limit]) + more
