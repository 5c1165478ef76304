"""`RoutingReplayer`: hands a model the expert ids that the engine used (R3).

The ids replace the choice, not the scores: the model gathers the scores from the *full* router
output at these ids, so that the router keeps its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from consistency.errors import RoutingReplayError, RoutingTraceError
from consistency.routing_replay.expert_ids import require_integer, require_routable
from consistency.routing_replay.trace import (
    RoutingTrace,
    concatenate,
    require_layers,
    require_shape,
    require_valid,
)


class RoutingReplayer:
    """Given to the model for one forward pass; `finish` proves that every layer was replayed.

    Args:
        expert_ids: uint8 or uint16 ``[tokens, moe_layers, topk]``, kept in its narrow dtype.
        valid: bool ``[tokens]``. Invalid tokens take the live router's choice.
        layers: decoder layer index of each row of ``moe_layers``.
        experts: number of experts.
        passes: how often each layer asks: 2 under activation recompute, whose second pass must see
            the very ids of the first, for the invalid tokens too, or tensor shapes change.

    Raises:
        RoutingTraceError: shapes or dtypes that do not fit, an id out of range, or twice in one
            row.
    """

    def __init__(
        self,
        expert_ids: Tensor,
        valid: Tensor,
        layers: Sequence[int],
        experts: int,
        *,
        passes: int = 1,
    ) -> None:
        self.layers = tuple(layers)
        require_layers(self.layers)
        require_shape(expert_ids, self.layers, experts)
        require_valid(valid, expert_ids.shape[0])
        require_routable(expert_ids, valid, experts)
        if type(passes) is not int or passes < 1:
            raise RoutingReplayError(f"passes is {passes!r}: use 1, or 2 under recompute")
        self.experts = experts
        self._expert_ids = expert_ids
        self._valid = valid
        self._passes = passes
        self._row = {layer: row for row, layer in enumerate(self.layers)}
        self._consumed = [0] * len(self.layers)
        self._live: dict[int, Tensor] = {}
        self._live_tokens = int((~valid).sum())

    @classmethod
    def of(
        cls, traces: Sequence[RoutingTrace], token_counts: Sequence[int], *, passes: int = 1
    ) -> RoutingReplayer:
        """Replays a packed batch: the traces of its sequences, in order.

        Args:
            traces: one per sequence, of one model.
            token_counts: tokens of each sequence in the batch. A trace must have exactly as many;
                `RoutingTrace.padded` adds those that the engine never routed.
            passes: as above.

        Raises:
            RoutingTraceError: a trace with too few or too many tokens, or of another model.
        """
        if len(traces) != len(token_counts):
            raise RoutingTraceError(
                f"{len(traces)} traces for {len(token_counts)} sequences: pass one per sequence"
            )
        for index, (trace, tokens) in enumerate(zip(traces, token_counts, strict=True)):
            if trace.tokens != tokens:
                few = "too few" if trace.tokens < tokens else "too many"
                raise RoutingTraceError(
                    f"trace {index} has {few} tokens, {trace.tokens} for a sequence of {tokens}: "
                    "pad the tokens that the engine never routed, or find the rows recorded twice"
                )
        whole = concatenate(traces)
        return cls(whole.expert_ids, whole.valid, whole.layers, whole.experts, passes=passes)

    @property
    def tokens(self) -> int:
        """Tokens of the pass."""
        return self._expert_ids.shape[0]

    @property
    def live_tokens(self) -> int:
        """Tokens without a traced routing, which take the live router: a metric to watch."""
        return self._live_tokens

    def ids_for(self, layer: int, live_ids: Tensor | None = None) -> Tensor:
        """Expert ids to use in one layer.

        Args:
            layer: decoder layer index.
            live_ids: the live router's choice, integer ``[tokens, topk]``. Needed when a token is
                invalid; when given, its shape proves that trace and batch hold the same tokens.

        Returns:
            int64 ``[tokens, topk]``.

        Raises:
            RoutingReplayError: not a traced layer, asked more than ``passes`` times, live ids of
                another shape, or an invalid token without live ids.
        """
        row = self._row.get(layer)
        if row is None:
            raise RoutingReplayError(
                f"layer {layer} has no traced routing: the trace holds layers {self.layers}"
            )
        if self._consumed[row] >= self._passes:
            raise RoutingReplayError(
                f"layer {layer} was replayed {self._passes} times already: make a replayer per "
                "pass (passes=2 under activation recompute)"
            )
        traced = self._expert_ids[:, row].to(torch.int64)
        if live_ids is not None:
            require_integer("live_ids", live_ids)
            if live_ids.shape != traced.shape:
                raise RoutingReplayError(
                    f"layer {layer} routes {list(live_ids.shape)}, the trace holds "
                    f"{list(traced.shape)} [tokens, topk]: replay the trace of exactly these tokens"
                )
        if self._live_tokens:
            live = self._live.get(row)
            if live is None:
                if live_ids is None:
                    raise RoutingReplayError(
                        f"{self._live_tokens} tokens have no traced routing: "
                        f"pass live_ids for layer {layer}"
                    )
                live = live_ids.detach().to(torch.int64, copy=True)
                if self._passes > 1:
                    self._live[row] = live
            traced = torch.where(self._valid[:, None], traced, live)
        self._consumed[row] += 1
        return traced

    def finish(self) -> None:
        """Call after the pass.

        Raises:
            RoutingReplayError: a layer was not replayed ``passes`` times; its entries would be
                stale.
        """
        left = [
            layer
            for layer, count in zip(self.layers, self._consumed, strict=True)
            if count != self._passes
        ]
        if left:
            raise RoutingReplayError(
                f"layers {left} were not replayed {self._passes} times: the model skipped them, or "
                "this was a forward-only pass under passes=2"
            )
