"""What replaces the router and the expert layer of Megatron-Core.

The contract adds a token's expert outputs in slot order, in fp32, before they are rounded.
Megatron-Core's dispatchers keep no slots and weigh the outputs before the second product, so the
whole layer is replaced: rows travel to the ranks of their experts, their unrounded outputs travel
back, and the rank that owns a token adds them. Which rank computed an expert changes no bit.
"""

# Megatron-Core is installed beside the engine tests only.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import checkpoint
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import distributed

from consistency import kernels
from consistency.kernels import collectives
from integrations.megatron.operators import own_weight

__all__ = ["MoeExperts", "Router"]


@dataclass(frozen=True, slots=True)
class Router:
    """`TopKRouter` on `kernels.route`: fp32 gate and softmax, ties to the lowest expert.

    The module's own `RouterReplay` records and replays, as in Megatron-Core.

    Args:
        module: the router.
        tp_invariant: as in `NumericsContract`.
    """

    module: Any
    tp_invariant: bool

    def __call__(
        self, input: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores fp32 and the routing map, both ``[tokens, experts]``, as the module returns."""
        del padding_mask  # of auxiliary losses, which are refused
        scores, ids = self.route(input.flatten(0, -2))
        shape = (ids.shape[0], self.module.num_experts)
        dense = scores.new_zeros(shape).scatter(1, ids, scores)
        return dense, torch.zeros(shape, dtype=torch.bool).scatter(1, ids, True)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores fp32 and ids int64, both ``[tokens, topk]`` in slot order."""
        module = self.module
        topk, normalise = module.topk, not module.config.moe_router_pre_softmax
        logits = kernels.linear(
            x, own_weight(module.weight), out_dtype=torch.float32, tp_invariant=self.tp_invariant
        )
        replay = module.router_replay
        if replay is None or replay.router_replay_action is None:
            return kernels.route(logits, topk, normalise=normalise)

        def live(
            scores: torch.Tensor, topk: int, num_groups: Any = None, group_topk: Any = None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            del num_groups, group_topk  # refused
            return kernels.route(scores.detach(), topk, normalise=normalise)

        _, ids = replay.get_replay_topk(logits, topk, None, None, live)
        return kernels.route(logits, topk, normalise=normalise, replay_ids=ids)


@dataclass(frozen=True, slots=True)
class MoeExperts:
    """`MoELayer` on the kernels that `kernels.moe_experts` is made of.

    Args:
        module: the layer; its experts are a `SequentialMLP`.
        tp_invariant: as in `NumericsContract`.
    """

    module: Any
    tp_invariant: bool

    def __call__(
        self,
        hidden_states: torch.Tensor,
        intermediate_tensors: Any = None,
        padding_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        """``[s, b, h]``, or this rank's part of it, to the same, and no bias."""
        del intermediate_tensors, padding_mask  # of CUDA graphs and auxiliary losses: refused
        if self.module.moe_layer_recompute and torch.is_grad_enabled():
            return checkpoint(self._layer, False, hidden_states), None
        return self._layer(hidden_states), None

    def _layer(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.flatten(0, -2)
        scores, ids = self._route(hidden_states)
        group = self.module.experts.tp_group
        split = group.size() > 1 and bool(self.module.config.sequence_parallel)
        if split:
            # Every rank holds a share of each expert, so it needs the tokens of all ranks.
            x, scores, ids = (
                collectives.gather_sequence(part, group=group) for part in (x, scores, ids)
            )
        out = self._experts(x, scores, ids)
        if split:
            out = collectives.scatter_sequence(out, group=group)
        return out.view(hidden_states.shape)

    def _route(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        router = self.module.router
        if isinstance(router.forward, Router):
            return router.forward.route(hidden_states.flatten(0, -2))
        dense, routed = router(hidden_states)
        # Megatron-Core's own router keeps no slots; the likeliest expert comes first elsewhere.
        ids = dense.detach().masked_fill(~routed, -1.0).topk(router.topk, dim=1).indices
        return dense.gather(1, ids).float(), ids

    def _experts(self, x: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        rows, place, offsets = kernels.moe_permute(x, ids, self.module.config.num_moe_experts)
        if self.module.ep_group.size() == 1:
            outputs = self._local(rows, offsets)
        else:
            outputs = self._exchanged(rows, offsets)
        return kernels.moe_combine(outputs, scores, place, x.dtype)

    def _exchanged(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Outputs of rows whose experts live on all ranks of the expert-parallel group."""
        group = self.module.ep_group
        size, rank = group.size(), distributed.get_rank(group)
        counts = offsets.diff().view(size, -1)
        everyone = counts.new_empty((size, *counts.shape))
        distributed.all_gather(list(everyone.unbind()), counts.contiguous(), group=group)
        arriving = everyone[:, rank]  # [source rank, local expert]
        sent, received = counts.sum(1).tolist(), arriving.sum(1).tolist()
        order = _by_expert(arriving)
        local = all_to_all(group, rows, received, sent).index_select(0, order)
        bounds = arriving.sum(0).cumsum(0)
        outputs = self._local(local, torch.cat((bounds.new_zeros(1), bounds)))
        return all_to_all(group, outputs.index_select(0, order.argsort()), sent, received)

    def _local(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """fp32 outputs ``[rows, h]`` of rows sorted by this rank's experts."""
        experts = self.module.experts
        parts = rows.split(offsets.diff().tolist())
        outputs = [
            self._expert(
                own_weight(expert.linear_fc1.weight), own_weight(expert.linear_fc2.weight), part
            )
            for expert, part in zip(experts.local_experts, parts, strict=True)
        ]
        return torch.cat(outputs)

    def _expert(
        self, gate_up: torch.Tensor, down: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        whole, group = self.tp_invariant, self.module.experts.tp_group
        halves = gate_up.chunk(2) if whole else (gate_up,)
        if group.size() == 1 or not len(rows):
            # All ranks of the group hold the same rows: without any there is nothing to add up.
            hidden = [kernels.linear(rows, half, tp_invariant=whole) for half in halves]
            activation = kernels.silu_and_mul(torch.cat(hidden, dim=-1))
            return kernels.linear(activation, down, out_dtype=torch.float32, tp_invariant=whole)
        hidden = [collectives.column_parallel_linear(rows, half, group=group) for half in halves]
        activation = kernels.silu_and_mul(torch.cat(hidden, dim=-1))
        return collectives.row_parallel_linear(
            activation, down, group=group, out_dtype=torch.float32
        )


def _by_expert(counts: torch.Tensor) -> torch.Tensor:
    """int64 ``[rows]``: rows that lie by (source, expert), in the order of (expert, source).

    Args:
        counts: int64 ``[sources, experts]``.
    """
    experts = torch.arange(counts.shape[1]).repeat(counts.shape[0])
    owner = experts.repeat_interleave(counts.flatten())
    return owner.argsort(stable=True)
