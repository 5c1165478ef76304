"""Digests of tensors, and the manifest of a version.

The digest of a tensor is xxh3_128 over its elements in row-major order: it depends on the values
alone, not on strides, offsets or the buffer they lie in, so it compares across layouts. xxh3_128
runs at memory speed and finds accidents (torn, stale, truncated or flipped bytes); it is no defence
against somebody who forges bytes on purpose. Who may connect is the channel's concern.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy
import torch
import xxhash

from weightplane.errors import LayoutError
from weightplane.layout import Layout

DIGEST_BYTES = 16


def tensor_digest(tensor: torch.Tensor) -> str:
    """xxh3_128 of the elements of ``tensor`` in row-major order.

    Args:
        tensor: any shape, strides, dtype and device; sparse tensors have no such order.

    Returns:
        32 hexadecimal digits.
    """
    return xxhash.xxh3_128_hexdigest(byte_view(tensor.contiguous()).data)


def byte_view(tensor: torch.Tensor) -> numpy.ndarray:
    """The bytes of a contiguous tensor as uint8 [bytes]; shares memory with a CPU tensor."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    return flat.view(torch.uint8).cpu().numpy()


@dataclass(frozen=True)
class Manifest:
    """What a version consists of: for every tensor of a layout, the digest of its bytes.

    Attributes:
        layout: the tensors, in the order of the digests.
        digests: `DIGEST_BYTES` bytes per tensor.
    """

    layout: Layout
    digests: tuple[bytes, ...]

    def __post_init__(self) -> None:
        if len(self.digests) != len(self.layout.tensors):
            raise LayoutError(
                f"a manifest has {len(self.digests)} digests for {len(self.layout.tensors)} tensors"
            )
        if any(len(digest) != DIGEST_BYTES for digest in self.digests):
            raise LayoutError(f"every digest of a manifest must have {DIGEST_BYTES} bytes")

    @classmethod
    def of(cls, state: Mapping[str, torch.Tensor]) -> Manifest:
        """The manifest of ``state`` with its whole-tensor layout."""
        layout = Layout.of(state)
        names = (spec.name for spec in layout.tensors)
        return cls(layout, tuple(bytes.fromhex(tensor_digest(state[name])) for name in names))

    @classmethod
    def unpack(cls, layout: Layout, packed: bytes) -> Manifest:
        """Rebuild a manifest from the digests in the order of the layout's tensors, end to end."""
        starts = range(0, len(packed), DIGEST_BYTES)
        return cls(layout, tuple(packed[start : start + DIGEST_BYTES] for start in starts))

    def pack(self) -> bytes:
        """The digests end to end, in the order of the layout's tensors."""
        return b"".join(self.digests)

    @cached_property
    def digest(self) -> str:
        """32 hexadecimal digits over every tensor's name, dtype, shape and digest.

        Offsets do not enter, so manifests of the same weights agree across layouts.
        """
        state = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for spec, digest in zip(self.layout.tensors, self.digests, strict=True):
            state.update(f"{len(spec.name)}:{spec.name}:{spec}:".encode())
            state.update(digest)
        return state.hexdigest()

    def changed_since(self, earlier: Manifest) -> tuple[str, ...]:
        """Names of the tensors whose dtype, shape or bytes differ from ``earlier``, sorted."""
        before = dict(zip(earlier.layout.tensors, earlier.digests, strict=True))
        pairs = zip(self.layout.tensors, self.digests, strict=True)
        return tuple(spec.name for spec, digest in pairs if before.get(spec) != digest)
