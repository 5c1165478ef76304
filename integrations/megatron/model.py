"""A `GPTModel` of Megatron-Core's own modules with the shape of a Hugging Face checkpoint."""

# Megatron-Core is installed beside the engine tests only.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.nn import functional

from integrations.errors import EngineConfigError
from integrations.trainer.model.config import ModelConfig

__all__ = ["ModelOptions", "SequenceParallelRmsNorm", "build_model", "transformer_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Choices that a checkpoint does not make.

    Attributes:
        dtype: of parameters and activations.
        sequence_parallel: split the tokens between the layers over the tensor-parallel ranks.
        recompute: recompute whole layers in the backward pass.
        routing_replay: give every router Megatron-Core's `RouterReplay`.
    """

    dtype: torch.dtype = torch.bfloat16
    sequence_parallel: bool = False
    recompute: bool = False
    routing_replay: bool = True


class SequenceParallelRmsNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` whose weight Megatron-Core sums over the tensor-parallel ranks.

    Its own wrapper of torch's norm refuses sequence parallelism; others need Apex or Transformer
    Engine.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel


def transformer_config(shape: ModelConfig, options: ModelOptions) -> TransformerConfig:
    """The configuration of the model on the ranks that `parallel_state` knows.

    Raises:
        EngineConfigError: a shape that Megatron-Core 0.16 has no configuration for.
    """
    if shape.moe_layers and shape.experts_per_token == 1 and shape.normalise_topk:
        raise EngineConfigError(
            "the model sends a token to 1 expert with weight 1 (norm_topk_prob): Megatron-Core "
            "0.16 has no such router"
        )
    sparse = set(shape.moe_layers)
    experts: dict[str, Any] = {}
    if sparse:
        experts = {
            "num_moe_experts": shape.experts,
            "moe_layer_freq": [int(layer in sparse) for layer in range(shape.layers)],
            "moe_ffn_hidden_size": shape.moe_intermediate_size,
            "moe_router_topk": shape.experts_per_token,
            "moe_router_pre_softmax": not shape.normalise_topk,
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "moe_aux_loss_coeff": 0.0,
            "moe_token_dispatcher_type": "allgather",
            "moe_grouped_gemm": False,
            "moe_enable_routing_replay": options.routing_replay,
            "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
            "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        }
    if options.recompute:
        experts |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        qk_layernorm=shape.qk_norm,
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_norm_eps,
        activation_func=functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        bf16=options.dtype == torch.bfloat16,
        fp16=options.dtype == torch.float16,
        params_dtype=options.dtype,
        pipeline_dtype=options.dtype,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        sequence_parallel=options.sequence_parallel,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **experts,
    )


def build_model(shape: ModelConfig, options: ModelOptions) -> GPTModel:
    """This rank's part of the model, its weights still undefined.

    Call it inside `on_cpu()` where there is no CUDA, after `parallel_state` is initialised.

    Raises:
        EngineConfigError: as `transformer_config`, context parallelism, or degrees of parallelism
            that the shape cannot be cut into.
    """
    _require_divisible(shape)
    config = transformer_config(shape, options)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    if options.sequence_parallel:
        _use_sequence_parallel_norms(spec, shape.qk_norm)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
    )
    # torch's norms start in fp32; Megatron-Core's mixed precision converts them, as here.
    return model.to(options.dtype)


def _use_sequence_parallel_norms(spec: Any, qk_norm: bool) -> None:
    spec.layer_norm = SequenceParallelRmsNorm
    for layer in spec.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = SequenceParallelRmsNorm
        if qk_norm:
            attention = parts.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = SequenceParallelRmsNorm


def _require_divisible(shape: ModelConfig) -> None:
    ring = parallel_state.get_context_parallel_world_size()
    if ring != 1:
        raise EngineConfigError(
            f"context_parallel_size is {ring}: Megatron-Core's own attention has no context "
            "parallelism, and a ring cuts the softmax elsewhere; use 1"
        )
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    groups = parallel_state.get_expert_model_parallel_world_size()
    cuts = [
        ("kv_heads", shape.kv_heads, "tensor", ranks),
        ("heads", shape.heads, "tensor", ranks),
        ("vocab_size", shape.vocab_size, "tensor", ranks),
        ("intermediate_size", shape.intermediate_size, "tensor", ranks),
        ("layers", shape.layers, "pipeline", stages),
    ]
    if shape.moe_layers:
        cuts.append(("experts", shape.experts, "expert", groups))
    for name, value, kind, size in cuts:
        if value % size:
            raise EngineConfigError(
                f"{name} is {value}, not a multiple of the {size} {kind}-parallel ranks: use fewer"
            )
