"""`RoutingRecorder`: collects the expert ids of one forward pass, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from consistency.errors import RoutingReplayError, RoutingTraceError
from consistency.routing_replay.expert_ids import expert_dtype, narrow, require_integer
from consistency.routing_replay.trace import require_layers


class RoutingRecorder:
    """Given to the model for a forward pass; every MoE layer records once, then `take` is called.

    A pass that is not taken does not leak into the next one: recording a layer again before `take`
    or `discard` raises.

    Args:
        moe_layers: decoder layer indices of the MoE layers, increasing.
        experts: number of experts.
        topk: experts per token.

    Raises:
        RoutingTraceError: an argument out of its range.
    """

    def __init__(self, moe_layers: Sequence[int], experts: int, topk: int) -> None:
        self.moe_layers = tuple(moe_layers)
        require_layers(self.moe_layers)
        expert_dtype(experts)
        if type(topk) is not int or not 1 <= topk <= experts:
            raise RoutingTraceError(f"topk is {topk!r}: use 1 to the {experts} experts")
        self.experts = experts
        self.topk = topk
        self._row = {layer: row for row, layer in enumerate(self.moe_layers)}
        self._rows: list[Tensor | None] = [None] * len(self.moe_layers)

    def record(self, layer: int, ids: Tensor) -> None:
        """Records one layer's routing.

        Args:
            layer: decoder layer index.
            ids: integer ``[tokens, topk]``, in slot order; copied.

        Raises:
            RoutingReplayError: not an MoE layer, recorded before, or a token count that differs
                from the other layers'.
        """
        row = self._row.get(layer)
        if row is None:
            raise RoutingReplayError(
                f"layer {layer} is not an MoE layer of this recorder: use one of {self.moe_layers}"
            )
        if self._rows[row] is not None:
            raise RoutingReplayError(
                f"layer {layer} was recorded already in this pass: an earlier pass was not taken "
                "or discarded, or activation recompute runs under the recorder"
            )
        require_integer("ids", ids)
        if ids.dim() != 2 or ids.shape[1] != self.topk:
            raise RoutingReplayError(
                f"layer {layer} recorded ids {list(ids.shape)}: use [tokens, topk {self.topk}]"
            )
        for other_layer, other in zip(self.moe_layers, self._rows, strict=True):
            if other is not None and other.shape[0] != ids.shape[0]:
                raise RoutingReplayError(
                    f"layer {layer} recorded {ids.shape[0]} tokens, layer {other_layer} "
                    f"{other.shape[0]}: record the same tokens in every layer"
                )
        # int32 until take(), which checks the range of all layers at once before it narrows: one
        # synchronisation per pass on an accelerator, not one per layer.
        self._rows[row] = ids.detach().to(torch.int32, copy=True)

    def take(self) -> Tensor:
        """The pass's ids, uint8 or uint16 ``[tokens, moe_layers, topk]``; the recorder starts anew.

        Raises:
            RoutingReplayError: a layer did not record.
            RoutingTraceError: an id out of range.
        """
        rows = [row for row in self._rows if row is not None]
        if len(rows) != len(self.moe_layers):
            missing = [
                layer for layer, row in zip(self.moe_layers, self._rows, strict=True) if row is None
            ]
            raise RoutingReplayError(
                f"layers {missing} did not record: run the whole model before take()"
            )
        self.discard()
        if not rows:
            return torch.empty((0, 0, self.topk), dtype=expert_dtype(self.experts))
        return narrow(torch.stack(rows, dim=1), self.experts)

    def discard(self) -> None:
        """Drops what was recorded, as after a pass that failed."""
        self._rows = [None] * len(self.moe_layers)
