"""`RoutingTraceBuilder`: the trace of a sequence while an engine still generates it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from consistency.errors import RoutingTraceError
from consistency.routing_replay.expert_ids import expert_dtype, narrow
from consistency.routing_replay.segment import Origin, Segment, append_segment
from consistency.routing_replay.trace import RoutingTrace, require_layers


class RoutingTraceBuilder:
    """Collects rows per step and freezes them into a `RoutingTrace`.

    Every append says at which position its first row stands, so that a row can be neither recorded
    twice nor skipped. Rows that an engine computes again (preemption, a swap that drops the KV)
    take the place of the old ones, under the origin ``re_prefilled``.

    Args:
        layers: decoder layer index of each MoE layer, increasing.
        experts: number of experts.
        topk: experts per token and layer.
        capacity: tokens to make room for at once; more are made as needed.

    Raises:
        RoutingTraceError: an argument out of its range.
    """

    def __init__(
        self, layers: Sequence[int], experts: int, topk: int, *, capacity: int = 64
    ) -> None:
        self.layers = tuple(layers)
        require_layers(self.layers)
        if type(topk) is not int or not 1 <= topk <= experts:
            raise RoutingTraceError(f"topk is {topk!r}: use 1 to the {experts} experts")
        self.experts = experts
        self.topk = topk
        self._ids = torch.zeros(
            (max(capacity, 1), len(self.layers), topk), dtype=expert_dtype(experts)
        )
        self._valid = torch.zeros(self._ids.shape[0], dtype=torch.bool)
        self._tokens = 0
        self._segments: list[Segment] = []

    def __len__(self) -> int:
        """Tokens recorded so far."""
        return self._tokens

    def append(
        self,
        expert_ids: Tensor,
        *,
        position: int,
        weight_version: int,
        origin: Origin,
    ) -> None:
        """Records the rows of consecutive tokens.

        Args:
            expert_ids: any integer dtype, ``[new tokens, moe_layers, topk]``; copied.
            position: index of the first new token in its sequence: ``len(self)``, or less when
                ``origin`` is ``re_prefilled``, which replaces the rows that stood there.
            weight_version, origin: as in `Segment`.

        Raises:
            RoutingTraceError: a gap, rows that were recorded before, or rows of another model.
        """
        if expert_ids.dim() != 3 or tuple(expert_ids.shape[1:]) != tuple(self._ids.shape[1:]):
            raise RoutingTraceError(
                f"expert_ids is {list(expert_ids.shape)}: "
                f"use [tokens, {len(self.layers)} moe layers, topk {self.topk}]"
            )
        if position > self._tokens or position < 0:
            raise RoutingTraceError(
                f"rows start at position {position}, but {self._tokens} tokens are recorded: "
                "record every token in order (append_invalid for those without a routing)"
            )
        if position < self._tokens and origin != "re_prefilled":
            raise RoutingTraceError(
                f"rows start at position {position}, but {self._tokens} tokens are recorded: "
                "truncate first, or record them as re_prefilled, which replaces the old rows"
            )
        stop = position + expert_ids.shape[0]
        if stop == position:
            return
        rows = narrow(expert_ids, self.experts)
        part = Segment(position, stop, weight_version, origin)
        self._grow(stop)
        self._ids[position:stop] = rows
        self._valid[position:stop] = True
        self._replace_segments(part)
        self._tokens = max(self._tokens, stop)

    def append_invalid(self, count: int = 1) -> None:
        """Records ``count`` tokens that no router saw, such as the last sampled token."""
        if count < 0:
            raise RoutingTraceError(f"count is {count}: use an integer >= 0")
        stop = self._tokens + count
        self._grow(stop)
        self._ids[self._tokens : stop] = 0
        self._valid[self._tokens : stop] = False
        self._tokens = stop

    def truncate(self, tokens: int) -> None:
        """Forgets every token from ``tokens`` on: what a preempted sequence will compute again.

        Raises:
            RoutingTraceError: more than were recorded.
        """
        if not 0 <= tokens <= self._tokens:
            raise RoutingTraceError(
                f"truncate to {tokens} tokens, but {self._tokens} are recorded: use 0 to that"
            )
        parts = (part.cut(0, tokens) for part in self._segments)
        self._segments = [part for part in parts if part is not None]
        self._tokens = tokens

    def build(self) -> RoutingTrace:
        """The rows so far as a frozen, checked trace; the builder may go on."""
        return RoutingTrace(
            expert_ids=self._ids[: self._tokens].clone(),
            layers=self.layers,
            experts=self.experts,
            valid=self._valid[: self._tokens].clone(),
            segments=tuple(self._segments),
        )

    def _replace_segments(self, part: Segment) -> None:
        if part.start >= self._tokens:
            append_segment(self._segments, part)
            return
        before = [old.cut(0, part.start) for old in self._segments]
        after = [old.cut(part.stop, self._tokens) for old in self._segments]
        self._segments = []
        for piece in (*before, part, *after):
            if piece is not None:
                append_segment(self._segments, piece)

    def _grow(self, tokens: int) -> None:
        room = self._ids.shape[0]
        if tokens <= room:
            return
        # Doubling keeps the cost of one row constant over a long generation.
        size = max(tokens, 2 * room)
        ids = self._ids.new_zeros((size, *self._ids.shape[1:]))
        valid = self._valid.new_zeros(size)
        ids[: self._tokens] = self._ids[: self._tokens]
        valid[: self._tokens] = self._valid[: self._tokens]
        self._ids, self._valid = ids, valid
