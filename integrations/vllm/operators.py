"""What replaces one layer of a vLLM model; each holds the layer, and says whether it ever ran."""

# vLLM is installed beside the engine tests only.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.forward_context import get_forward_context

from consistency import kernels

__all__ = [
    "AttentionLayer",
    "ExpertLayer",
    "LinearMethod",
    "LmHead",
    "Operator",
    "RmsNorm",
    "RotaryEmbedding",
    "SiluAndMul",
]


class Operator:
    """Something routed to the contract.

    Attributes:
        operation: its name in `OPERATIONS`.
        where: the layer's path in the model.
        fired: whether it was called.
    """

    __slots__ = ("fired", "operation", "where")

    def __init__(self, operation: str, where: str) -> None:
        self.operation = operation
        self.where = where
        self.fired = False


class LinearMethod(Operator):
    """Takes the place of a linear layer's quantisation method."""

    __slots__ = ("_tp_invariant",)

    def __init__(self, where: str, tp_invariant: bool) -> None:
        super().__init__("linear", where)
        self._tp_invariant = tp_invariant

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        self.fired = True
        return kernels.linear(x, layer.weight, bias, tp_invariant=self._tp_invariant)


class LmHead(Operator):
    """Takes the place of `LogitsProcessor._apply_head`: fp32 logits."""

    __slots__ = ("_vocabulary",)

    def __init__(self, where: str, vocabulary: int) -> None:
        super().__init__("lm_head", where)
        self._vocabulary = vocabulary

    def __call__(
        self, lm_head: Any, hidden_states: torch.Tensor, embedding_bias: torch.Tensor | None
    ) -> torch.Tensor:
        self.fired = True
        # The rows beyond the vocabulary are vLLM's padding.
        return kernels.lm_head_logits(hidden_states, lm_head.weight[: self._vocabulary])


class RmsNorm(Operator):
    """Takes the place of `RMSNorm.forward`.

    With a residual the sum is rounded to the residual's dtype first, and the norm reads the rounded
    sum: that is the contract's convention, and transformers', not vLLM's.
    """

    __slots__ = ("_layer",)

    def __init__(self, where: str, layer: Any) -> None:
        super().__init__("rms_norm", where)
        self._layer = layer

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        self.fired = True
        layer = self._layer
        if residual is None:
            return kernels.rms_norm(x, layer.weight, layer.variance_epsilon)
        residual = x + residual
        return kernels.rms_norm(residual, layer.weight, layer.variance_epsilon), residual


class SiluAndMul(Operator):
    """Takes the place of `SiluAndMul.forward`."""

    __slots__ = ()

    def __init__(self, where: str) -> None:
        super().__init__("silu_and_mul", where)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.fired = True
        return kernels.silu_and_mul(x)


class RotaryEmbedding(nn.Module, Operator):
    """Takes the place of a rotary module, which vLLM shares between layers and engines.

    Args:
        where: the layer's path.
        table: `kernels.rotary_table`.
    """

    def __init__(self, where: str, table: torch.Tensor) -> None:
        nn.Module.__init__(self)
        Operator.__init__(self, "rotary", where)
        self._table = table
        self._head_dim = table.shape[1]

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.fired = True
        return self._rotate(query, positions), self._rotate(key, positions)

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        by_head = x.view(x.shape[0], -1, self._head_dim)
        return kernels.rotary(by_head, positions, self._table).view(x.shape)


class AttentionLayer(Operator):
    """Takes the place of `Attention.forward`, over vLLM's own paged cache.

    The cache of a layer is ``[blocks, kv_heads, block_size, 2 head_dim]`` in memory, but the first
    half of each head's block holds keys ``[block_size, head_dim]``, the second the values.
    """

    __slots__ = ("_layer", "_scale")

    def __init__(self, where: str, layer: Any) -> None:
        super().__init__("attention", where)
        self._layer = layer
        self._scale = float(layer.impl.scale)

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output_shape: torch.Size | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        self.fired = True
        layer = self._layer
        tokens = query.shape[0]
        query = query.view(tokens, layer.num_heads, layer.head_size)
        metadata: Any = get_forward_context().attn_metadata
        if metadata is None:  # a profiling run without a cache
            return torch.zeros_like(query).view(tokens, -1)
        metadata = metadata[layer.layer_name]
        key_cache, value_cache = split_cache(layer.kv_cache)
        blocks, offsets = _slots(metadata, key_cache.shape[1])
        by_head = (tokens, layer.num_kv_heads, layer.head_size)
        key_cache[blocks, offsets] = key.view(by_head)
        value_cache[blocks, offsets] = value.view(by_head)
        mixed = kernels.attention_paged(
            query,
            key_cache,
            value_cache,
            metadata.block_table,
            metadata.query_start_loc,
            metadata.seq_lens,
            scale=self._scale,
        )
        return mixed.view(tokens, -1)


def split_cache(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a layer's cache as ``[blocks, block_size, kv_heads, head_dim]`` views."""
    blocks, heads, block_size, twice = cache.shape
    halves = cache.view(blocks, heads, 2 * block_size, twice // 2)
    keys, values = halves.split(block_size, dim=2)
    return keys.transpose(1, 2), values.transpose(1, 2)


def _slots(metadata: Any, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Block and offset of every new token; computed by the first layer of a step for the others."""
    slots = getattr(metadata, "lockstep_slots", None)
    if slots is None:
        mapping = metadata.slot_mapping
        slots = metadata.lockstep_slots = (mapping // block_size, mapping % block_size)
    return slots


class ExpertLayer(Operator):
    """Takes the place of `MoERunner.forward`: gate, router and experts of one MoE layer.

    Args:
        where: the layer's path.
        runner: vLLM's `MoERunner`.
        operations: which of router and experts go to the contract; the other stays vLLM's.
        tp_invariant: as in `NumericsContract`.
        record: told the expert ids of every pass, or None.
    """

    def __init__(
        self,
        where: str,
        runner: Any,
        operations: frozenset[str],
        tp_invariant: bool,
        record: Callable[[torch.Tensor], None] | None,
    ) -> None:
        super().__init__("router" if "router" in operations else "experts", where)
        self._runner = runner
        self._router_routed = "router" in operations
        self._experts_routed = "experts" in operations
        self._tp_invariant = tp_invariant
        self._record = record

    def __call__(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.fired = True
        runner = self._runner
        scores, ids = self._route(hidden_states)
        if self._record is not None:
            self._record(ids)
        experts = runner.routed_experts
        if self._experts_routed:
            return kernels.moe_experts(
                hidden_states,
                experts.w13_weight,
                experts.w2_weight,
                scores.float(),
                ids.to(torch.int64),
                tp_invariant=self._tp_invariant,
            )
        return experts.forward_modular(
            x=hidden_states,
            topk_weights=scores,
            topk_ids=ids.to(torch.int32),
            shared_experts=None,
            shared_experts_input=None,
        )

    def _route(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        router, gate = self._runner.router, self._runner.gate
        if self._router_routed:
            logits = kernels.linear(
                hidden_states,
                gate.weight,
                out_dtype=torch.float32,
                tp_invariant=self._tp_invariant,
            )
            return kernels.route(logits, router.top_k, normalise=bool(router.renormalize))
        logits, _ = gate(hidden_states)
        return router.select_experts(
            hidden_states=hidden_states,
            router_logits=logits,
            topk_indices_dtype=torch.int32,
            input_ids=None,
        )
