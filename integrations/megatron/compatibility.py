"""What `patch` refuses, in one line: settings that would take a number outside the contract."""

# Megatron-Core is installed beside the engine tests only.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from torch.nn import functional

from consistency.contract import NumericsContract
from consistency.errors import UnsupportedError
from integrations.megatron.version import require_version

__all__ = ["core_model", "moe_layers", "require_supported", "rotary_settings"]

_ONLY: Final[tuple[tuple[str, Any, str], ...]] = (
    ("context_parallel_size", 1, "a ring of ranks cuts the softmax in other places"),
    ("fp8", None, "only unquantised weights have kernels"),
    ("fp4", None, "only unquantised weights have kernels"),
    ("quant_recipe", None, "only unquantised weights have kernels"),
    ("hidden_dropout", 0.0, "dropout draws another number on every rank"),
    ("attention_dropout", 0.0, "dropout draws another number on every rank"),
    ("add_bias_linear", False, "projections with a bias have no patch"),
    ("add_qkv_bias", False, "projections with a bias have no patch"),
    ("gated_linear_unit", True, "SwiGLU is the activation that has a kernel"),
    ("activation_func_clamp_value", None, "SwiGLU is the activation that has a kernel"),
    ("glu_linear_offset", 0.0, "SwiGLU is the activation that has a kernel"),
    ("bias_activation_fusion", False, "the fused activation rounds elsewhere"),
    ("layernorm_zero_centered_gamma", False, "the loader and the engines store the whole weight"),
    ("fp32_residual_connection", False, "the contract rounds the residual before each norm"),
    ("apply_query_key_layer_scaling", False, "the scale would depend on the layer"),
    ("multi_latent_attention", False, "latent attention has no patch"),
    ("attention_output_gate", False, "gated attention has no patch"),
    ("window_size", None, "sliding windows have no patch"),
    ("softmax_type", "vanilla", "attention sinks have no patch"),
    ("no_rope_freq", None, "layers without rotation have no patch"),
    ("rotary_interleaved", False, "the kernel rotates halves"),
    ("fused_single_qkv_rope", False, "the fused rotation goes round the patch"),
    ("mtp_num_layers", None, "multi-token prediction has no patch"),
    ("gradient_accumulation_fusion", False, "the fused gradient goes round the patch"),
    ("defer_embedding_wgrad_compute", False, "the deferred gradient goes round the patch"),
    ("delay_wgrad_compute", False, "the deferred gradient goes round the patch"),
    ("cpu_offloading", False, "offloading goes round the patch"),
    ("fine_grained_activation_offloading", False, "offloading goes round the patch"),
    ("overlap_moe_expert_parallel_comm", False, "the overlapped schedule goes round the patch"),
    ("cuda_graph_impl", "none", "captured graphs go round the patch"),
    ("batch_invariant_mode", False, "it is another contract"),
)
"""Fields of `TransformerConfig`, the value that is supported, and why."""

_ONLY_MOE: Final[tuple[tuple[str, Any, str], ...]] = (
    ("moe_grouped_gemm", False, "the experts must be a SequentialMLP"),
    ("moe_router_score_function", "softmax", "the kernel's router is a softmax"),
    ("moe_router_group_topk", None, "group-limited routing has no kernel"),
    ("moe_router_topk_scaling_factor", None, "scaled scores have no kernel"),
    ("moe_router_enable_expert_bias", False, "a router with an expert bias has no kernel"),
    ("moe_router_fusion", False, "the fused router turns replay off in silence"),
    ("moe_router_force_load_balancing", False, "random routes replay nothing"),
    ("moe_expert_capacity_factor", None, "dropped tokens depend on the batch"),
    ("moe_input_jitter_eps", None, "jitter draws another number on every rank"),
    ("moe_z_loss_coeff", None, "auxiliary losses have no patch"),
    ("moe_shared_expert_intermediate_size", None, "shared experts have no patch"),
    ("moe_latent_size", None, "latent projections have no patch"),
    ("moe_apply_probs_on_input", False, "the contract weighs the experts' outputs"),
)

# Recomputing layer norms needs Transformer Engine in this release; the others lie inside a patch.
_RECOMPUTABLE: Final = frozenset({"core_attn", "mlp", "moe"})


def core_model(model: Any) -> Any:
    """The `GPTModel` inside Megatron-Core's wrappers (mixed precision, data parallelism).

    Raises:
        UnsupportedError: there is none.
    """
    inner = model
    while not isinstance(inner, GPTModel) and hasattr(inner, "module"):
        inner = inner.module
    if type(inner) is not GPTModel:
        raise UnsupportedError(f"model is a {type(inner).__name__}: patches exist for GPTModel")
    return inner


def require_supported(model: Any, contract: NumericsContract) -> None:
    """Checks every setting and parameter of a `GPTModel`.

    Raises:
        EngineConfigError: another version of Megatron-Core.
        UnsupportedError: one line: the first setting that cannot be honoured, its value, and why.
    """
    require_version()
    for complaint in _complaints(model, contract):
        raise UnsupportedError(f"lockstep cannot keep its contract in this GPTModel: {complaint}")


def _complaints(model: Any, contract: NumericsContract) -> Iterator[str]:
    config = model.config
    rules = [*_ONLY, *(_ONLY_MOE if config.num_moe_experts else ())]
    for name, supported, why in rules:
        value = getattr(config, name)
        if value != supported:
            yield f"{name} is {value!r}, {why}: use {supported!r}"
    if config.activation_func is not functional.silu:
        name = getattr(config.activation_func, "__name__", config.activation_func)
        yield f"activation_func is {name}, SwiGLU has the kernel: use torch.nn.functional.silu"
    if config.num_moe_experts:
        yield from _moe_complaints(config)
    modules = set(config.recompute_modules or ())
    if config.recompute_granularity == "selective" and not modules <= _RECOMPUTABLE:
        listed = ", ".join(sorted(modules - _RECOMPUTABLE))
        yield f"recompute_modules has {listed}, which cannot be recomputed by themselves: drop them"
    if config.tensor_model_parallel_size > 1 and not contract.tp_invariant:
        yield (
            f"tensor_model_parallel_size is {config.tensor_model_parallel_size} and the contract's "
            "tp_invariant is False, which is for one rank: pass NumericsContract(tp_invariant=True)"
            " on both sides"
        )
    for name, length, ranks in _cut_reductions(model):
        if contract.tp_invariant and contract.matmul_chunks(length) % ranks:
            yield (
                f"{name} is {length}, which the contract does not cut for {ranks} ranks: use a "
                f"multiple of {64 * ranks}, or fewer ranks"
            )
    for name, parameter in model.named_parameters():
        if parameter.device.type != contract.device:
            yield (
                f"parameter {name} is on {parameter.device}; the contract is of the "
                f"{contract.device}: move the model there"
            )
        if parameter.dtype != contract.torch_dtype:
            yield (
                f"parameter {name} is {parameter.dtype}, the contract computes in "
                f"{contract.compute_dtype}: convert the model to that dtype"
            )


def _cut_reductions(model: Any) -> Iterator[tuple[str, int, int]]:
    """What is summed over ranks, how long the whole sum is, and over how many ranks."""
    config, ranks = model.config, model.config.tensor_model_parallel_size
    queries = config.num_attention_heads * config.kv_channels
    keys = config.num_query_groups * config.kv_channels
    yield "num_attention_heads x kv_channels", queries, ranks
    yield "the width of queries, keys and values", queries + 2 * keys, ranks
    yield "vocab_size", model.vocab_size, ranks
    layers = moe_layers(config)
    if len(layers) < config.num_layers:
        yield "ffn_hidden_size", config.ffn_hidden_size, ranks
    if layers:
        yield "moe_ffn_hidden_size", config.moe_ffn_hidden_size, config.expert_tensor_parallel_size


def moe_layers(config: Any) -> tuple[int, ...]:
    """Indices of the MoE layers of the whole model, as a `TransformerConfig` names them."""
    frequency = config.moe_layer_freq
    if not config.num_moe_experts:
        return ()
    if isinstance(frequency, int):
        return tuple(range(0, config.num_layers, frequency))
    return tuple(layer for layer, sparse in enumerate(frequency) if sparse)


def _moe_complaints(config: Any) -> Iterator[str]:
    kinds, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    pairs = zip(_listed(kinds), _listed(coefficients), strict=False)
    if any(kind != "none" and (kind == "sinkhorn" or value) for kind, value in pairs):
        yield (
            f"moe_router_load_balancing_type is {kinds!r} with moe_aux_loss_coeff {coefficients!r},"
            " auxiliary losses have no patch: use 'none'"
        )
    if (
        config.tensor_model_parallel_size > 1
        and config.expert_tensor_parallel_size != config.tensor_model_parallel_size
        and not config.sequence_parallel
    ):
        yield (
            f"expert_tensor_parallel_size is {config.expert_tensor_parallel_size} and "
            f"tensor_model_parallel_size is {config.tensor_model_parallel_size}: every expert would"
            " count a token once per rank; use sequence_parallel=True"
        )


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def rotary_settings(model: Any) -> tuple[int, int, float]:
    """head_dim, positions and theta of the model's rotation.

    Raises:
        UnsupportedError: frequencies that are not theta^(-2 i / head_dim).
    """
    rotary: Any = getattr(model, "rotary_pos_emb", None)
    if type(rotary) is not RotaryEmbedding:
        raise UnsupportedError(
            f"position_embedding_type is {model.position_embedding_type!r}: 'rope' has a kernel"
        )
    head_dim = model.config.kv_channels
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (model.rotary_base**steps)
    if rotary.seq_len_interpolation_factor is not None or not torch.equal(
        rotary.inv_freq.cpu(), plain
    ):
        raise UnsupportedError(
            f"the rotary frequencies are not {model.rotary_base}^(-2 i / {head_dim}): scaled, "
            "interpolated and partial rotations have no kernel"
        )
    return head_dim, model.max_sequence_length, model.rotary_base
