"""Where keys and values live: packed beside the queries (learner) or in a paged cache (engine)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from consistency import kernels

__all__ = ["AttentionContext", "KeyValueCache", "PagedAttention", "VarlenAttention"]


class AttentionContext(Protocol):
    """Causal attention of one packed batch; the decoder calls it once per layer, in order."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
    ) -> torch.Tensor:
        """Attention output ``[tokens, heads, head_dim]``.

        Args:
            layer: index of the decoder layer.
            query: ``[tokens, heads, head_dim]``, rotated.
            key, value: ``[tokens, kv_heads, head_dim]`` of the same tokens, keys rotated.
            scale: factor on the scores.
        """
        ...


@dataclass(frozen=True, slots=True)
class VarlenAttention:
    """Whole sequences packed one after the other; differentiable.

    Attributes:
        cu_seqlens: int32 ``[sequences + 1]``, where each sequence starts.
    """

    cu_seqlens: torch.Tensor

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
    ) -> torch.Tensor:
        """See :meth:`AttentionContext.attend`."""
        del layer
        return kernels.attention_varlen(query, key, value, self.cu_seqlens, scale=scale)


@dataclass(frozen=True, slots=True)
class KeyValueCache:
    """Keys and values of one layer, each ``[blocks, block_size, kv_heads, head_dim]``."""

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def allocate(
        cls, blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> KeyValueCache:
        """A cache of zeros."""
        shape = (blocks, block_size, kv_heads, head_dim)
        return cls(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))

    def write(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store ``key`` and ``value`` ``[tokens, kv_heads, head_dim]`` at ``slots`` int64."""
        self.keys.flatten(0, 1).index_copy_(0, slots, key)
        self.values.flatten(0, 1).index_copy_(0, slots, value)


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """New tokens of many sequences over a paged cache; keys and values are stored, then read.

    Attributes:
        caches: one per decoder layer.
        block_tables: int32 ``[sequences, max_blocks]``.
        query_starts: int32 ``[sequences + 1]``, where the new tokens of each sequence start.
        context_lengths: int32 ``[sequences]``, keys of each sequence, cached and new.
        slots: int64 ``[tokens]``, ``block * block_size + offset`` of every new token.
    """

    caches: Sequence[KeyValueCache]
    block_tables: torch.Tensor
    query_starts: torch.Tensor
    context_lengths: torch.Tensor
    slots: torch.Tensor

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
    ) -> torch.Tensor:
        """See :meth:`AttentionContext.attend`."""
        cache = self.caches[layer]
        cache.write(self.slots, key, value)
        return kernels.attention_paged(
            query,
            cache.keys,
            cache.values,
            self.block_tables,
            self.query_starts,
            self.context_lengths,
            scale=scale,
        )
