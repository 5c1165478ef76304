"""``Decoder``: the one model definition that the rollout engine and the learner both run.

The engine calls it without gradients over a paged cache, the learner with gradients over packed
sequences. Nothing else differs, so with the same weights and contract both get the same bits.

Residual convention: the sum of a residual branch is rounded to the compute dtype, and the next
norm reads the rounded sum (as transformers does; some engines normalise the unrounded sum).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from consistency import kernels
from consistency.contract import NumericsContract
from consistency.quant import quantised_linear, quantised_moe_experts
from consistency.routing_replay import RoutingRecorder
from integrations.errors import ModelConfigError
from integrations.trainer.model.attention import AttentionContext
from integrations.trainer.model.config import ModelConfig
from integrations.trainer.model.weights import EMBEDDING, FINAL_NORM, LayerNames, Weight, dense

__all__ = ["Decoder", "RoutingHook", "RoutingOverride"]


class RoutingOverride(Protocol):
    """Chooses the experts of a layer, given what the live router would choose."""

    def ids_for(self, layer: int, live_ids: torch.Tensor | None) -> torch.Tensor:
        """Expert ids int64 ``[tokens, topk]``; ``RoutingReplayer`` is one."""
        ...


RoutingHook = RoutingRecorder | RoutingOverride


class Decoder:
    """A Llama-family, Qwen3 or Qwen3-MoE decoder over the kernels of ``consistency``.

    It holds no weights: every call takes them, so that one decoder serves many weight versions.

    Args:
        config: shape of the model.
        contract: the numerics contract; its ``tp_invariant`` is applied to every matmul.
        max_positions: size of the rotary table, ``config.max_positions`` unless given.

    Raises:
        UnsupportedError: the contract names a choice that the kernels do not have.
        ModelConfigError: the model does not have that many positions.
    """

    def __init__(
        self, config: ModelConfig, contract: NumericsContract, *, max_positions: int | None = None
    ) -> None:
        contract.require_supported()
        self.config = config
        self.contract = contract
        self.max_positions = config.max_positions if max_positions is None else max_positions
        if not 1 <= self.max_positions <= config.max_positions:
            raise ModelConfigError(
                f"max_positions is {self.max_positions}; this model has 1..{config.max_positions}"
            )
        self._table = kernels.rotary_table(config.head_dim, self.max_positions, config.rope_theta)
        self._names = tuple(LayerNames.of(layer) for layer in range(config.layers))
        self._sparse = frozenset(config.moe_layers)
        self._scale = config.head_dim**-0.5
        self._tp_invariant = contract.tp_invariant

    def forward(
        self,
        weights: Mapping[str, Weight],
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionContext,
        routing: RoutingHook | None = None,
    ) -> torch.Tensor:
        """Hidden states after the final norm, ``[tokens, hidden]``.

        Args:
            weights: the in-memory tensors of :func:`~.weights.tensor_shapes`; those of linears and
                experts may be packed, which changes no bit against their QDQ.
            token_ids: int64 ``[tokens]``, packed.
            positions: int64 ``[tokens]``, position of each token in its sequence.
            attention: which keys each token sees.
            routing: a recorder is told the expert ids of every MoE layer; an override
                (``RoutingReplayer``) decides them, and gradients still reach the router.
        """
        config = self.config
        hidden = kernels.embedding(token_ids, dense(weights, EMBEDDING))
        for layer, names in enumerate(self._names):
            normed = kernels.rms_norm(hidden, dense(weights, names.input_norm), config.rms_norm_eps)
            hidden = hidden + self._attention(layer, names, weights, normed, positions, attention)
            normed = kernels.rms_norm(hidden, dense(weights, names.mlp_norm), config.rms_norm_eps)
            if layer in self._sparse:
                hidden = hidden + self._experts(layer, names, weights, normed, routing)
            else:
                hidden = hidden + self._mlp(names, weights, normed)
        return kernels.rms_norm(hidden, dense(weights, FINAL_NORM), config.rms_norm_eps)

    def _linear(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        return quantised_linear(x, weight, tp_invariant=self._tp_invariant)

    def _attention(
        self,
        layer: int,
        names: LayerNames,
        weights: Mapping[str, Weight],
        x: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionContext,
    ) -> torch.Tensor:
        config = self.config
        heads, kv_heads = config.heads, config.kv_heads
        qkv = self._linear(x, weights[names.qkv]).view(-1, heads + 2 * kv_heads, config.head_dim)
        query, key, value = qkv.split((heads, kv_heads, kv_heads), dim=1)
        if config.qk_norm:
            query = kernels.rms_norm(query, dense(weights, names.query_norm), config.rms_norm_eps)
            key = kernels.rms_norm(key, dense(weights, names.key_norm), config.rms_norm_eps)
        query = kernels.rotary(query, positions, self._table)
        key = kernels.rotary(key, positions, self._table)
        mixed = attention.attend(layer, query, key, value, scale=self._scale)
        return self._linear(mixed.flatten(1), weights[names.output])

    def _mlp(
        self, names: LayerNames, weights: Mapping[str, Weight], x: torch.Tensor
    ) -> torch.Tensor:
        gate_up = self._linear(x, weights[names.gate_up])
        return self._linear(kernels.silu_and_mul(gate_up), weights[names.down])

    def _experts(
        self,
        layer: int,
        names: LayerNames,
        weights: Mapping[str, Weight],
        x: torch.Tensor,
        routing: RoutingHook | None,
    ) -> torch.Tensor:
        logits = kernels.linear(
            x,
            dense(weights, names.router),
            out_dtype=torch.float32,
            tp_invariant=self._tp_invariant,
        )
        scores, ids = self._route(layer, logits, routing)
        return quantised_moe_experts(
            x,
            weights[names.expert_gate_up],
            weights[names.expert_down],
            scores,
            ids,
            tp_invariant=self._tp_invariant,
        )

    def _route(
        self, layer: int, logits: torch.Tensor, routing: RoutingHook | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Router weights fp32 and expert ids ``[tokens, topk]``, live or replayed."""
        topk, normalise = self.config.experts_per_token, self.config.normalise_topk
        if routing is None or isinstance(routing, RoutingRecorder):
            scores, ids = kernels.route(logits, topk, normalise=normalise)
            if routing is not None:
                routing.record(layer, ids)
            return scores, ids
        _, live_ids = kernels.route(logits.detach(), topk, normalise=normalise)
        ids = routing.ids_for(layer, live_ids)
        return kernels.route(logits, topk, normalise=normalise, replay_ids=ids)
