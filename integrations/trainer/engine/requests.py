"""The requests an engine holds: per-request facts, and per-token arrays for bulk access.

A step touches every running request. What it needs of each (tokens, positions, block tables,
seeds) lies in arrays indexed by the request's *row*, so that a step is a fixed number of numpy
calls however many requests run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from consistency.routing_replay import Origin, Segment
from consistency.routing_replay.segment import append_segment
from integrations.trainer.model.weights import Weight
from integrations.trainer.trajectory import GenerationRequest

__all__ = ["Place", "RequestState", "RequestTable", "WeightSet"]

_PADDING_TOKEN = -1


class Place(Enum):
    """Where a request stands: computed in every step, queued for that, or set aside."""

    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"


@dataclass(frozen=True, slots=True, eq=False)
class WeightSet:
    """The weights of one swap.

    Attributes:
        epoch: counts swaps, so it tells sets apart even if a version number is used twice.
        version: the weight version that tokens are tagged with.
        tensors: in-memory tensors by name.
    """

    epoch: int
    version: int
    tensors: Mapping[str, Weight]


@dataclass(slots=True, eq=False)
class RequestState:
    """What the engine knows about one request, beside its row of the table.

    Attributes:
        order: arrival number; lower goes first.
        row: index into the table.
        weights: what computes it from here on.
        blocks: its blocks in position order; empty if it has no KV.
        pure: every row of its KV was built by ``weights``, so full blocks may be shared.
        keys: keys of its first full blocks under the weights of ``keys_epoch``.
        published: how many of its blocks were offered to the prefix cache.
        log: the build log so far; ``logged`` rows of the present KV are in it.
        built: rows that were computed at least once by a KV that was dropped since.
        kept_routes: expert ids ``[rows, moe_layers, topk]`` of the first rows, saved when the KV
            that they belong to was dropped.
    """

    request: GenerationRequest
    order: int
    row: int
    weights: WeightSet
    place: Place = Place.WAITING
    blocks: list[int] = field(default_factory=list)
    pure: bool = True
    keys: list[bytes] = field(default_factory=list)
    keys_epoch: int = -1
    published: int = 0
    log: list[Segment] = field(default_factory=list)
    logged: int = 0
    built: int = 0
    kept_routes: np.ndarray | None = None

    @property
    def started(self) -> bool:
        """Whether any row was ever computed for it or taken from the cache."""
        return bool(self.blocks or self.log)

    def note_rows(self, stop: int) -> None:
        """Log the rows ``[logged, stop)`` of the present KV as built by ``weights``."""
        prompt = len(self.request.prompt)
        rebuilt = min(max(self.built, self.logged), stop)
        prefilled = min(max(prompt, rebuilt), stop)
        self._append(self.logged, rebuilt, "re_prefilled")
        self._append(rebuilt, prefilled, "prefilled")
        self._append(prefilled, stop, "generated")
        self.logged = stop

    def note_cached(self, stop: int) -> None:
        """Log the rows ``[0, stop)`` as taken from the prefix cache of ``weights``."""
        self._append(0, stop, "cached")
        self.logged = stop

    def _append(self, start: int, stop: int, origin: Origin) -> None:
        if start < stop:
            append_segment(self.log, Segment(start, stop, self.weights.version, origin))


class RequestTable:
    """Arrays over rows; rows are handed out and taken back.

    Attributes:
        tokens: int64 ``[rows, width]``, prompt and response.
        logprobs: fp32 ``[rows, width]``, of response tokens.
        versions: int64 ``[rows, width]``, of response tokens.
        length: int64 ``[rows]``, tokens known.
        computed: int64 ``[rows]``, rows of the present KV.
        limit: int64 ``[rows]``, length at which generation ends.
        blocks: int32 ``[rows, width / block_size]``, the block table.
        block_count: int64 ``[rows]``, how many of its entries are set.
        temperature: fp32 ``[rows]``; seed: int64 ``[rows]``.
        stops: int64 ``[rows, most stop ids]``, padded with -1.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._free: list[int] = []
        rows, width = 0, block_size
        self.tokens = np.zeros((rows, width), np.int64)
        self.logprobs = np.zeros((rows, width), np.float32)
        self.versions = np.zeros((rows, width), np.int64)
        self.blocks = np.zeros((rows, 1), np.int32)
        self.stops = np.full((rows, 1), _PADDING_TOKEN, np.int64)
        self.length = np.zeros(rows, np.int64)
        self.computed = np.zeros(rows, np.int64)
        self.limit = np.zeros(rows, np.int64)
        self.block_count = np.zeros(rows, np.int64)
        self.seed = np.zeros(rows, np.int64)
        self.temperature = np.zeros(rows, np.float32)

    def add(self, request: GenerationRequest) -> int:
        """Store a request; returns its row."""
        limit = len(request.prompt) + request.max_new_tokens
        self._fit(limit, len(request.stop_token_ids))
        row = self._free.pop()
        self.tokens[row, : len(request.prompt)] = request.prompt
        self.length[row] = len(request.prompt)
        self.computed[row] = 0
        self.block_count[row] = 0
        self.limit[row] = limit
        self.temperature[row] = request.temperature
        self.seed[row] = request.seed
        self.stops[row] = _PADDING_TOKEN
        self.stops[row, : len(request.stop_token_ids)] = request.stop_token_ids
        return row

    def remove(self, row: int) -> None:
        """Hand a row back."""
        self._free.append(row)

    def _fit(self, width: int, stops: int) -> None:
        """Grow the arrays, at least twofold, to hold one more request of ``width`` tokens."""
        rows, old_width = self.tokens.shape
        if width > old_width:
            width = _round_up(max(width, 2 * old_width), self._block_size)
            for name in ("tokens", "logprobs", "versions"):
                setattr(self, name, _grown(getattr(self, name), (rows, width)))
            self.blocks = _grown(self.blocks, (rows, width // self._block_size))
        if stops > self.stops.shape[1]:
            self.stops = _grown(self.stops, (rows, stops), _PADDING_TOKEN)
        if not self._free:
            more = max(16, 2 * rows)
            for name in ("tokens", "logprobs", "versions", "blocks"):
                array = getattr(self, name)
                setattr(self, name, _grown(array, (more, array.shape[1])))
            self.stops = _grown(self.stops, (more, self.stops.shape[1]), _PADDING_TOKEN)
            for name in ("length", "computed", "limit", "block_count", "seed", "temperature"):
                setattr(self, name, _grown(getattr(self, name), (more,)))
            self._free = list(range(more - 1, rows - 1, -1))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _grown(array: np.ndarray, shape: tuple[int, ...], fill: int = 0) -> np.ndarray:
    larger = np.full(shape, fill, array.dtype)
    larger[tuple(slice(n) for n in array.shape)] = array
    return larger
