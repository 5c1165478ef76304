"""`RouteRecorder`: the expert ids of every token, kept beside the KV cache of a vLLM worker.

Expert ids live in the same slots as the keys and values they were computed with. So a prefix hit
finds the routes of the shared blocks, chunks of a prefill join by themselves, and a trace is
complete whatever the request shared. vLLM's own capture needs its V2 model runner, which does not
run on the CPU.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch

from consistency.errors import RoutingReplayError
from consistency.routing_replay import ORIGINS, RoutingTrace, Segment, expert_dtype
from integrations.errors import RequestError
from integrations.trainer.model.config import ModelConfig

__all__ = ["KEPT_TRACES", "RouteRecorder"]

KEPT_TRACES: Final = 1024
"""Traces of finished requests that wait for `take`; beyond these the oldest are dropped."""

_PREFILLED: Final = ORIGINS.index("prefilled")
_GENERATED: Final = ORIGINS.index("generated")
_CACHED: Final = ORIGINS.index("cached")
_RE_PREFILLED: Final = ORIGINS.index("re_prefilled")


@dataclass(slots=True)
class _Request:
    """One request while the worker knows it.

    Attributes:
        serial: which of the slots' rows are its own.
        computed: rows that it has in the cache.
        kept: rows saved when it was preempted: ids, versions and origins.
    """

    serial: int
    computed: int = 0
    kept: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None


class RouteRecorder:
    """Records while a worker runs; see `take`.

    Args:
        shape: a model with at least one MoE layer.
        slots: tokens that the KV cache holds.
        block_size: tokens of a block.
    """

    def __init__(self, shape: ModelConfig, slots: int, block_size: int) -> None:
        self._shape = shape
        self._layers = shape.moe_layers
        self._row = {layer: row for row, layer in enumerate(self._layers)}
        self._block_size = block_size
        dtype = torch.empty(0, dtype=expert_dtype(shape.experts)).numpy().dtype
        width = (len(self._layers), shape.experts_per_token)
        self._ids = np.zeros((slots, *width), dtype)
        self._version = np.zeros(slots, np.int64)
        self._origin = np.zeros(slots, np.uint8)
        self._serial = np.zeros(slots, np.int64)
        self._step: list[torch.Tensor] = []
        self._requests: dict[str, _Request] = {}
        self._finished: OrderedDict[str, RoutingTrace] = OrderedDict()
        self._next_serial = 1
        self.version = 0
        """Weight version of the rows that come next."""

    def record(self, layer: int, ids: torch.Tensor) -> None:
        """One layer's expert ids ``[tokens, topk]`` of the pass that is under way."""
        if self._row[layer] != len(self._step):
            raise RoutingReplayError(
                f"layer {layer} was recorded after {len(self._step)} of the MoE layers "
                f"{self._layers}: a layer ran twice or was left out"
            )
        self._step.append(ids)

    def discard(self) -> None:
        """Drops a pass that belongs to no request."""
        self._step = []

    def store(self, batch: Any, counts: np.ndarray, starts: np.ndarray, slots: np.ndarray) -> None:
        """Keeps the pass that ended, one row per slot.

        Args:
            batch: vLLM's input batch.
            counts: tokens of each of its requests in this pass.
            starts: position of the first of them.
            slots: cache slot of every token.
        """
        step, self._step = self._step, []
        if len(step) != len(self._layers):
            raise RoutingReplayError(
                f"{len(step)} of the MoE layers {self._layers} were recorded: a layer was left out"
            )
        rows = len(counts)
        ids = step[0] if len(step) == 1 else torch.stack(step, dim=1)
        self._ids[slots] = ids.reshape(-1, len(self._layers), ids.shape[-1]).numpy()
        self._version[slots] = self.version
        prompt, length = batch.num_prompt_tokens[:rows], batch.num_tokens_no_spec[:rows]
        serials = np.empty(rows, np.int64)
        for row, name in enumerate(batch.req_ids):
            request = self._requests.get(name)
            if request is None:
                request = self._requests[name] = _Request(self._next_serial)
                self._next_serial += 1
            request.computed = int(starts[row] + counts[row])
            serials[row] = request.serial
        # A position before the newest token that is computed while answers exist is computed again.
        if len(slots) == rows:
            again = starts < length - 1
            fresh = np.where(starts >= prompt, _GENERATED, _PREFILLED)
            self._serial[slots] = serials
            self._origin[slots] = np.where(again & (length > prompt), _RE_PREFILLED, fresh)
            return
        owner = np.repeat(np.arange(rows), counts)
        within = np.arange(len(slots)) - np.repeat(np.cumsum(counts) - counts, counts)
        positions = starts[owner] + within
        again = (positions < length[owner] - 1) & (length[owner] > prompt[owner])
        fresh = np.where(positions >= prompt[owner], _GENERATED, _PREFILLED)
        self._serial[slots] = serials[owner]
        self._origin[slots] = np.where(again, _RE_PREFILLED, fresh)

    def keep(self, name: str, blocks: Sequence[int]) -> None:
        """Saves the rows of a request whose blocks are about to be given away.

        Rows saved before stay as they are: they belong to the tokens sampled with them.
        """
        request = self._requests.get(name)
        if request is not None:
            request.kept = self._rows(request, blocks)
            request.computed = 0

    def finish(self, name: str, blocks: Sequence[int]) -> None:
        """Makes the trace of a request that ended or was aborted; call before its slots are
        written again."""
        request = self._requests.pop(name, None)
        if request is None:
            return
        trace = self._trace(request, blocks)
        if trace is not None:
            self._finished[name] = trace
            if len(self._finished) > KEPT_TRACES:
                self._finished.popitem(last=False)

    def take(self, name: str, blocks: Sequence[int] | None) -> RoutingTrace:
        """The trace of a request by vLLM's internal id, or by the id its caller gave it.

        Covers every token that was computed: all but the last sampled one. A finished request's
        trace is handed out once.

        Args:
            name: of the request.
            blocks: of a request that the worker still holds.

        Raises:
            RequestError: no such request, or its trace was taken or dropped.
        """
        known = _matching(name, self._finished) or _matching(name, self._requests)
        if known in self._finished:
            return self._finished.pop(known)
        if known is not None and blocks is not None:
            trace = self._trace(self._requests[known], blocks)
            if trace is not None:
                return trace
        raise RequestError(
            f"no routing trace of request {name!r}: it computed nothing, or its trace was taken "
            f"already, or dropped ({KEPT_TRACES} are kept)"
        )

    def _rows(
        self, request: _Request, blocks: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids, versions and origins of all rows that were ever computed."""
        positions = np.arange(request.computed)
        table = np.asarray(blocks, np.int64)
        slots = table[positions // self._block_size] * self._block_size
        slots += positions % self._block_size
        own = self._serial[slots] == request.serial
        origin = np.where(own, self._origin[slots], _CACHED)
        present = (self._ids[slots], self._version[slots], origin)
        if request.kept is None:
            return present
        kept, held = request.kept, len(request.kept[1])
        again = min(held, len(positions))
        origins = kept[2].copy()
        origins[:again] = np.where(own[:again], _RE_PREFILLED, origins[:again])
        return (
            np.concatenate((kept[0], present[0][held:])),
            np.concatenate((kept[1], present[1][held:])),
            np.concatenate((origins, present[2][held:])),
        )

    def _trace(self, request: _Request, blocks: Sequence[int]) -> RoutingTrace | None:
        ids, versions, origins = self._rows(request, blocks)
        if not len(ids):
            return None
        edges = np.flatnonzero((np.diff(versions) != 0) | (np.diff(origins) != 0)) + 1
        segments = tuple(
            Segment(start, stop, int(versions[start]), ORIGINS[origins[start]])
            for start, stop in pairwise([0, *edges.tolist(), len(ids)])
        )
        return RoutingTrace(
            expert_ids=torch.from_numpy(np.ascontiguousarray(ids)),
            layers=self._layers,
            experts=self._shape.experts,
            valid=torch.ones(len(ids), dtype=torch.bool),
            segments=segments,
        )


def _matching(name: str, known: Any) -> str | None:
    """vLLM appends eight random characters to the id that a caller gave."""
    if name in known:
        return name
    return next((full for full in known if full.rpartition("-")[0] == name), None)
