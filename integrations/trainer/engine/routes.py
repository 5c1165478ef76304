"""``RouteStore``: expert ids kept beside the KV cache, and the routing trace made of them.

Expert ids live in the same slots as the keys and values they were computed with. So a prefix hit
finds the routes of the shared blocks as well, and a trace is complete whatever the request shared.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from consistency.routing_replay import ORIGINS, RoutingRecorder, RoutingTrace, Segment
from integrations.trainer.engine.requests import RequestState, RequestTable
from integrations.trainer.model.config import ModelConfig

__all__ = ["RouteStore"]


class RouteStore:
    """Expert ids of every cache slot of a mixture-of-experts model.

    Args:
        config: a model with at least one MoE layer.
        table: the block tables.
        blocks, block_size: as of the KV cache.
    """

    def __init__(
        self, config: ModelConfig, table: RequestTable, blocks: int, block_size: int
    ) -> None:
        self.recorder = RoutingRecorder(config.moe_layers, config.experts, config.experts_per_token)
        self._config = config
        self._table = table
        self._block_size = block_size
        width = (len(config.moe_layers), config.experts_per_token)
        dtype = np.uint8 if config.experts <= 256 else np.uint16
        self._ids = np.zeros((blocks * block_size, *width), dtype)

    def store(self, slots: np.ndarray) -> None:
        """Keep what the recorder saw in the last forward pass, one row per slot."""
        self._ids[slots] = self.recorder.take().numpy()

    def keep(self, state: RequestState) -> None:
        """Save the routes of a request whose KV is about to be dropped.

        Rows that were saved before stay as they are: they belong to the logprobs that were
        sampled with them, and a second pass under newer weights may route differently.
        """
        state.kept_routes = self._rows(state, int(self._table.computed[state.row]))

    def trace(self, state: RequestState) -> RoutingTrace | None:
        """The trace of a request, None if no row was computed."""
        if not state.log:
            return None
        rows = int(self._table.length[state.row]) - 1
        known = self._rows(state, min(int(self._table.computed[state.row]), rows))
        ids = np.zeros((rows, *known.shape[1:]), known.dtype)
        ids[: len(known)] = known
        valid = torch.zeros(rows, dtype=torch.bool)
        valid[: len(known)] = True
        return RoutingTrace(
            expert_ids=torch.from_numpy(ids),
            layers=self._config.moe_layers,
            experts=self._config.experts,
            valid=valid,
            segments=_first_passes(state.log, rows),
        )

    def _rows(self, state: RequestState, computed: int) -> np.ndarray:
        """Routes of all rows that were ever computed: those saved, then those in the cache."""
        kept = state.kept_routes
        start = 0 if kept is None else len(kept)
        if kept is not None and start >= computed:
            return kept
        positions = np.arange(start, computed)
        blocks = self._table.blocks[state.row, positions // self._block_size].astype(np.int64)
        present = self._ids[blocks * self._block_size + positions % self._block_size]
        return present if kept is None else np.concatenate((kept, present))


def _first_passes(log: list[Segment], rows: int) -> tuple[Segment, ...]:
    """The log as consecutive segments: each row with its first version, marked if built again."""
    version = np.full(rows, -1, np.int64)
    origin = np.full(rows, -1, np.int64)
    again = ORIGINS.index("re_prefilled")
    for segment in log:
        span = slice(segment.start, min(segment.stop, rows))
        fresh = origin[span] < 0
        version[span] = np.where(fresh, segment.weight_version, version[span])
        origin[span] = np.where(fresh, ORIGINS.index(segment.origin), again)
    edges = np.flatnonzero((np.diff(version) != 0) | (np.diff(origin) != 0)) + 1
    bounds = [0, *edges.tolist(), rows] if rows else []
    segments: list[Segment] = []
    for start, stop in pairwise(bounds):
        if origin[start] >= 0:
            segments.append(Segment(start, stop, int(version[start]), ORIGINS[origin[start]]))
    return tuple(segments)
