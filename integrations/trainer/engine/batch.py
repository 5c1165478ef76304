"""``PackedBatch``: the token ids, positions and cache slots of one step, built in bulk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from integrations.trainer.engine.requests import RequestTable
from integrations.trainer.model.attention import KeyValueCache, PagedAttention

__all__ = ["PackedBatch"]


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """New rows of several requests, one request after the other.

    Attributes:
        token_ids, positions, slots: int64 ``[tokens]``.
        query_starts: int32 ``[requests + 1]``.
        context_lengths: int32 ``[requests]``.
        block_tables: int32 ``[requests, most blocks]``.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    query_starts: np.ndarray
    context_lengths: np.ndarray
    block_tables: np.ndarray

    @classmethod
    def pack(
        cls, table: RequestTable, rows: np.ndarray, counts: np.ndarray, block_size: int
    ) -> PackedBatch:
        """The next ``counts`` rows (each at least 1) of the requests at ``rows`` of the table."""
        starts = table.computed[rows]
        ends = starts + counts
        query_starts = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=query_starts[1:])
        request = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(query_starts[-1]) + (starts - query_starts[:-1])[request]
        tables = table.blocks[rows, : -(-int(ends.max()) // block_size)]
        block, offset = np.divmod(positions, block_size)
        return cls(
            token_ids=table.tokens[rows[request], positions],
            positions=positions,
            slots=tables[request, block].astype(np.int64) * block_size + offset,
            query_starts=query_starts,
            context_lengths=ends.astype(np.int32),
            block_tables=np.ascontiguousarray(tables),
        )

    def attention(self, caches: Sequence[KeyValueCache]) -> PagedAttention:
        """The attention context of this batch over ``caches``."""
        return PagedAttention(
            caches=caches,
            block_tables=torch.from_numpy(self.block_tables),
            query_starts=torch.from_numpy(self.query_starts),
            context_lengths=torch.from_numpy(self.context_lengths),
            slots=torch.from_numpy(self.slots),
        )
