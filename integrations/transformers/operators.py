"""What replaces the `forward` of one module of transformers; each holds the module it replaces."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from consistency import kernels
from consistency.errors import InvalidInputError, UnsupportedError
from integrations.transformers.packing import BatchShape, sequence_starts

__all__ = ["Attention", "Experts", "Linear", "LmHead", "Mlp", "RmsNorm", "Router"]


@dataclass(frozen=True, slots=True)
class Linear:
    """`nn.Linear` on `kernels.linear`."""

    module: nn.Linear
    tp_invariant: bool

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self.module.weight, self.module.bias
        return kernels.linear(input, weight, bias, tp_invariant=self.tp_invariant)


@dataclass(frozen=True, slots=True)
class LmHead:
    """The head on `kernels.lm_head_logits`: fp32 logits."""

    module: nn.Linear

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        logits = kernels.lm_head_logits(input.flatten(0, -2), self.module.weight)
        return logits.view(*input.shape[:-1], logits.shape[-1])


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """An RMSNorm on `kernels.rms_norm`."""

    module: Any

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return kernels.rms_norm(hidden_states, self.module.weight, self.module.variance_epsilon)


@dataclass(frozen=True, slots=True)
class Mlp:
    """A SwiGLU layer whose activation is `kernels.silu_and_mul`; its projections are `Linear`."""

    module: Any

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        module = self.module
        gate_up = torch.cat((module.gate_proj(x), module.up_proj(x)), dim=-1)
        return module.down_proj(kernels.silu_and_mul(gate_up))


@dataclass(frozen=True, slots=True)
class Router:
    """A top-k router: fp32 gate and softmax, ties to the lowest expert.

    Returns what the module returns: logits fp32 ``[tokens, experts]``, scores fp32 and ids int64
    ``[tokens, topk]``.
    """

    module: Any
    tp_invariant: bool

    def __call__(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        module = self.module
        logits = kernels.linear(
            hidden_states.reshape(-1, module.hidden_dim),
            module.weight,
            out_dtype=torch.float32,
            tp_invariant=self.tp_invariant,
        )
        scores, ids = kernels.route(logits, module.top_k, normalise=bool(module.norm_topk_prob))
        return logits, scores, ids


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of an MoE layer on `kernels.moe_experts`."""

    module: Any
    tp_invariant: bool

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return kernels.moe_experts(
            hidden_states,
            self.module.gate_up_proj,
            self.module.down_proj,
            top_k_weights.float(),
            top_k_index,
            tp_invariant=self.tp_invariant,
        )


@dataclass(frozen=True, slots=True)
class Attention:
    """An attention module: rotary and attention of the contract between its own projections.

    Args:
        module: the module.
        table: `kernels.rotary_table`, or None to leave the rotation to `rotate`.
        rotate: transformers' own rotation, used when `table` is None.
        stock: transformers' attention function, used when given; None for the contract's kernel.
    """

    module: Any
    table: torch.Tensor | None
    rotate: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    stock: Callable[..., Any] | None

    def __call__(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        *,
        past_key_values: Any = None,
        position_ids: torch.Tensor | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        module = self.module
        cache = past_key_values if cache is None else cache
        rows, tokens = hidden_states.shape[:2]
        by_head = (rows, tokens, -1, module.head_dim)
        query = module.q_proj(hidden_states).view(by_head)
        key = module.k_proj(hidden_states).view(by_head)
        value = module.v_proj(hidden_states).view(by_head)
        if hasattr(module, "q_norm"):
            query, key = module.q_norm(query), module.k_norm(key)
        if position_ids is None:
            raise InvalidInputError(
                "position_ids did not reach the attention: call the whole model, not a layer of it"
            )
        position_ids = position_ids.expand(rows, tokens)
        query, key = self._rotated(query, key, position_ids, position_embeddings)
        if cache is not None:
            if getattr(cache, "is_compileable", False):
                raise UnsupportedError(
                    f"cache is a {type(cache).__name__}, whose length is fixed: use DynamicCache"
                )
            stored = cache.update(key.transpose(1, 2), value.transpose(1, 2), module.layer_idx)
            key, value = (part.transpose(1, 2) for part in stored)
        if self.stock is not None:
            mixed, _ = self.stock(
                module,
                *(part.transpose(1, 2) for part in (query, key, value)),
                attention_mask,
                dropout=0.0,
                scaling=module.scaling,
                **options,
            )
        else:
            mixed = self._attend(query, key, value, attention_mask, position_ids)
        return module.o_proj(mixed.reshape(rows, tokens, -1)), None

    def _rotated(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        position_ids: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.table is None:
            if position_embeddings is None:
                raise InvalidInputError("position_embeddings is None: call the whole model")
            return self.rotate(query, key, *position_embeddings, unsqueeze_dim=2)
        positions = position_ids.reshape(-1)
        table = self.table
        return tuple(  # type: ignore[return-value]
            kernels.rotary(part.flatten(0, 1), positions, table).view(part.shape)
            for part in (query, key)
        )

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor,
    ) -> torch.Tensor:
        """Attention output ``[rows, queries, heads, head_dim]``."""
        rows, queries = query.shape[:2]
        keys = key.shape[1]
        scale = self.module.scaling
        if not math.isfinite(scale):
            raise InvalidInputError(f"scaling is {scale}: it must be finite")
        shape = BatchShape.of(rows, queries, keys, attention_mask)
        if keys == queries:
            starts = shape.query_starts()
            if attention_mask is None:
                starts = sequence_starts(position_ids)
            packed_query, packed_key, packed_value = (
                shape.pack_queries(part) for part in (query, key, value)
            )
            return shape.unpack(
                kernels.attention_varlen(
                    packed_query, packed_key, packed_value, starts, scale=scale
                )
            )
        if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
            raise UnsupportedError(
                f"cache holds {keys - queries} tokens in a pass with gradients: attention over a "
                "filled cache has no backward; pass the whole sequence, or use torch.no_grad()"
            )
        # Pages of one token, so that padding at the front moves no key to another position.
        context = shape.context_lengths()
        packed_keys, packed_values = (shape.pack_keys(x).unsqueeze(1) for x in (key, value))
        first = torch.cat((context.new_zeros(1), context.cumsum(0)[:-1])).to(torch.int32)
        pages = first[:, None] + torch.arange(int(context.max()), dtype=torch.int32)
        return shape.unpack(
            kernels.attention_paged(
                shape.pack_queries(query),
                packed_keys,
                packed_values,
                pages.clamp(max=packed_keys.shape[0] - 1).to(torch.int32),
                shape.query_starts(),
                context,
                scale=scale,
            )
        )
