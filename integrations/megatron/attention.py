"""`SelfAttention.forward` with the rotation and the attention of the contract."""

# Megatron-Core is installed beside the engine tests only.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb

from consistency import kernels
from consistency.errors import InvalidInputError, UnsupportedError

__all__ = ["Attention"]


@dataclass(frozen=True, slots=True)
class Attention:
    """Rotation and attention between the module's own projections and norms.

    Args:
        module: the `SelfAttention`.
        table: `kernels.rotary_table`, or None to leave the rotation to Megatron-Core.
        attend: whether the attention is the contract's.
    """

    module: Any
    table: torch.Tensor | None
    attend: bool

    def __call__(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        key_value_states: torch.Tensor | None = None,
        inference_context: Any = None,
        rotary_pos_emb: Any = None,
        rotary_pos_cos: Any = None,
        rotary_pos_sin: Any = None,
        rotary_pos_cos_sin: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        sequence_len_offset: Any = None,
        *,
        inference_params: Any = None,
    ) -> tuple[torch.Tensor, None]:
        """``[s, b, h]`` to the same, and no bias; packed sequences are ``[tokens, 1, h]``."""
        del rotary_pos_cos, rotary_pos_sin, rotary_pos_cos_sin, sequence_len_offset
        for name, value in (
            ("key_value_states", key_value_states),
            ("inference_context", inference_context),
            ("inference_params", inference_params),
            ("attention_bias", attention_bias),
        ):
            if value is not None:
                raise UnsupportedError(
                    f"{name} is given to a patched attention, which is for training and scoring "
                    "over whole sequences: unpatch the model first"
                )
        query, key, value = self.module.get_query_key_value_tensors(hidden_states)
        tokens, rows = query.shape[:2]
        if packed_seq_params is None:
            if self.attend:
                _require_causal(attention_mask, tokens)
            starts = torch.arange(rows + 1, dtype=torch.int32) * tokens
        else:
            starts = _packed_starts(packed_seq_params, tokens)
        query, key = self._rotated(query, key, starts, rotary_pos_emb, packed_seq_params)
        if self.attend:
            mixed = kernels.attention_varlen(
                _by_sequence(query),
                _by_sequence(key),
                _by_sequence(value),
                starts,
                scale=self.module.core_attention.softmax_scale,
            )
            mixed = mixed.view(rows, tokens, -1).transpose(0, 1).contiguous()
        else:
            mixed = self.module.core_attention(
                query,
                key,
                value,
                attention_mask,
                attn_mask_type=self.module.attn_mask_type,
                attention_bias=None,
                packed_seq_params=packed_seq_params,
            )
        return self.module.linear_proj(mixed)

    def _rotated(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        starts: torch.Tensor,
        frequencies: Any,
        packed: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys ``[s, b, heads, head_dim]``, rotated."""
        module, table = self.module, self.table
        if table is None:
            both = frequencies if isinstance(frequencies, tuple) else (frequencies,) * 2
            rotated = []
            for part, freqs in zip((query, key), both, strict=True):
                flat = part if packed is None else part.squeeze(1)
                turned = apply_rotary_pos_emb(
                    flat,
                    freqs,
                    config=module.config,
                    cu_seqlens=None if packed is None else starts,
                    cp_group=module.pg_collection.cp,
                )
                rotated.append(turned.view(part.shape))
            return rotated[0], rotated[1]
        tokens, rows = query.shape[:2]
        if packed is None:
            positions = torch.arange(tokens).repeat_interleave(rows)
        else:
            lengths = starts.diff()
            positions = torch.arange(tokens) - starts[:-1].repeat_interleave(lengths)
        return tuple(  # type: ignore[return-value]
            kernels.rotary(part.flatten(0, 1), positions, table).view(part.shape)
            for part in (query, key)
        )


def _by_sequence(part: torch.Tensor) -> torch.Tensor:
    """``[s, b, heads, head_dim]`` to ``[b s, heads, head_dim]``, one sequence after the other."""
    return part.transpose(0, 1).flatten(0, 1)


def _require_causal(mask: torch.Tensor | None, tokens: int) -> None:
    """Raises unless a mask (True = hidden) is the causal one, which the kernel has anyway."""
    if mask is None:
        return
    causal = torch.ones(tokens, tokens, dtype=torch.bool).triu(diagonal=1)
    if mask.shape[-2:] != causal.shape or not bool((mask.bool() == causal).all()):
        raise UnsupportedError(
            f"attention_mask {list(mask.shape)} is not the causal mask of {tokens} tokens: pass "
            "None or the causal mask; pad at the end, or pack sequences with packed_seq_params"
        )


def _packed_starts(packed: Any, tokens: int) -> torch.Tensor:
    """int32 ``[sequences + 1]``: where packed sequences begin, with the padding behind each."""
    if packed.qkv_format != "thd":
        raise UnsupportedError(
            f"packed_seq_params.qkv_format is {packed.qkv_format!r}: patched attention takes 'thd'"
        )
    starts = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else (
        packed.cu_seqlens_q_padded
    )  # fmt: skip
    if int(starts[0]) != 0 or int(starts[-1]) != tokens:
        raise InvalidInputError(
            f"packed_seq_params.cu_seqlens_q runs from {int(starts[0])} to {int(starts[-1])}, but "
            f"the batch has {tokens} tokens: it must run from 0 to their number"
        )
    return starts.to(torch.int32)
