"""Names and shapes of a decoder's tensors in memory, and where a checkpoint keeps their parts.

In memory, projections that read the same input are one tensor: ``qkv_proj`` stacks queries, keys
and values, ``gate_up_proj`` stacks gate and up, and the experts of a layer are ``[experts, out,
in]``. Stacking along the output dimension changes no bit of a result, because every output of
the matmul kernels is reduced on its own.

On disk the names are those of transformers, one tensor per projection and per expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from consistency.quant import PackedTensor
from integrations.errors import CheckpointError
from integrations.trainer.model.config import ModelConfig

__all__ = [
    "CheckpointPart",
    "EMBEDDING",
    "FINAL_NORM",
    "LM_HEAD",
    "LayerNames",
    "Weight",
    "checkpoint_parts",
    "checkpoint_shapes",
    "dense",
    "init_random",
    "lm_head_weight",
    "tensor_shapes",
    "validate_weights",
]

Weight = torch.Tensor | PackedTensor
"""A weight in memory; those of matrix products may be packed."""

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class LayerNames:
    """The in-memory tensor names of one decoder layer."""

    input_norm: str
    qkv: str
    query_norm: str
    key_norm: str
    output: str
    mlp_norm: str
    gate_up: str
    down: str
    router: str
    expert_gate_up: str
    expert_down: str

    @classmethod
    def of(cls, layer: int) -> LayerNames:
        """Names of decoder layer ``layer``."""
        prefix = f"model.layers.{layer}"
        return cls(
            input_norm=f"{prefix}.input_layernorm.weight",
            qkv=f"{prefix}.self_attn.qkv_proj.weight",
            query_norm=f"{prefix}.self_attn.q_norm.weight",
            key_norm=f"{prefix}.self_attn.k_norm.weight",
            output=f"{prefix}.self_attn.o_proj.weight",
            mlp_norm=f"{prefix}.post_attention_layernorm.weight",
            gate_up=f"{prefix}.mlp.gate_up_proj.weight",
            down=f"{prefix}.mlp.down_proj.weight",
            router=f"{prefix}.mlp.gate.weight",
            expert_gate_up=f"{prefix}.mlp.experts.gate_up_proj",
            expert_down=f"{prefix}.mlp.experts.down_proj",
        )


@dataclass(frozen=True, slots=True)
class CheckpointPart:
    """One checkpoint tensor and the rows of the in-memory tensor that it fills.

    Attributes:
        name: tensor name on disk.
        start, stop: rows along the output dimension.
        expert: index along the leading expert dimension, None for tensors without one.
    """

    name: str
    start: int
    stop: int
    expert: int | None = None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of the in-memory ``tensor`` that this part fills."""
        return (tensor if self.expert is None else tensor[self.expert])[self.start : self.stop]


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every in-memory tensor, in the order of the forward pass."""
    hidden, head = config.hidden_size, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    sparse = set(config.moe_layers)
    for layer in range(config.layers):
        names = LayerNames.of(layer)
        shapes[names.input_norm] = (hidden,)
        shapes[names.qkv] = ((config.heads + 2 * config.kv_heads) * head, hidden)
        if config.qk_norm:
            shapes[names.query_norm] = (head,)
            shapes[names.key_norm] = (head,)
        shapes[names.output] = (hidden, config.heads * head)
        shapes[names.mlp_norm] = (hidden,)
        if layer in sparse:
            width = config.moe_intermediate_size
            shapes[names.router] = (config.experts, hidden)
            shapes[names.expert_gate_up] = (config.experts, 2 * width, hidden)
            shapes[names.expert_down] = (config.experts, hidden, width)
        else:
            shapes[names.gate_up] = (2 * config.intermediate_size, hidden)
            shapes[names.down] = (hidden, config.intermediate_size)
    shapes[FINAL_NORM] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    return shapes


def checkpoint_parts(config: ModelConfig) -> dict[str, tuple[CheckpointPart, ...]]:
    """For every in-memory tensor, the checkpoint tensors that it is made of."""
    parts: dict[str, tuple[CheckpointPart, ...]] = {}
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    for name, shape in tensor_shapes(config).items():
        stem, _, field = name.removesuffix(".weight").rpartition(".")
        if field == "qkv_proj":
            ends = (0, queries, queries + keys, queries + 2 * keys)
            pieces = tuple(
                CheckpointPart(f"{stem}.{projection}.weight", ends[i], ends[i + 1])
                for i, projection in enumerate(("q_proj", "k_proj", "v_proj"))
            )
        elif stem.endswith(".experts"):
            pieces = tuple(
                CheckpointPart(f"{stem}.{expert}.{part.name}.weight", part.start, part.stop, expert)
                for expert in range(config.experts)
                for part in _stacked(field, shape[1])
            )
        elif field == "gate_up_proj":
            pieces = tuple(
                CheckpointPart(f"{stem}.{part.name}.weight", part.start, part.stop)
                for part in _stacked(field, shape[0])
            )
        else:
            pieces = (CheckpointPart(name, 0, shape[0]),)
        parts[name] = pieces
    return parts


def checkpoint_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor as checkpoints store it: one per projection and expert."""
    whole = tensor_shapes(config)
    found: dict[str, tuple[int, ...]] = {}
    for name, parts in checkpoint_parts(config).items():
        for part in parts:
            inner = whole[name][1:] if part.expert is None else whole[name][2:]
            found[part.name] = (part.stop - part.start, *inner)
    return found


def _stacked(field: str, rows: int) -> tuple[CheckpointPart, ...]:
    """Gate above up; any other projection stands alone."""
    if field != "gate_up_proj":
        return (CheckpointPart(field, 0, rows),)
    return (
        CheckpointPart("gate_proj", 0, rows // 2),
        CheckpointPart("up_proj", rows // 2, rows),
    )


def init_random(
    config: ModelConfig, seed: int, dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """Fresh weights: normal with ``initializer_range``, norms at one.

    The projections that write to the residual stream are scaled by ``1 / sqrt(2 layers)``, so
    that its variance does not grow with depth. The same seed gives the same bits.
    """
    generator = torch.Generator().manual_seed(seed)
    residual_scale = (2 * config.layers) ** -0.5
    weights: dict[str, torch.Tensor] = {}
    for name, shape in tensor_shapes(config).items():
        if len(shape) == 1:
            weights[name] = torch.ones(shape, dtype=dtype)
            continue
        scale = config.initializer_range
        if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
            scale *= residual_scale
        weights[name] = (torch.randn(shape, generator=generator) * scale).to(dtype)
    return weights


def dense(weights: Mapping[str, Weight], name: str) -> torch.Tensor:
    """A weight that is not packed.

    Raises:
        CheckpointError: it is.
    """
    weight = weights[name]
    if isinstance(weight, PackedTensor):
        raise CheckpointError(f"tensor {name} is packed; only linears and experts can be")
    return weight


def lm_head_weight(weights: Mapping[str, Weight]) -> torch.Tensor:
    """The weight of the LM head, ``[vocab, hidden]``: its own, or the tied embedding."""
    return dense(weights, LM_HEAD if LM_HEAD in weights else EMBEDDING)


def validate_weights(config: ModelConfig, weights: Mapping[str, Weight]) -> None:
    """Check that ``weights`` holds exactly the tensors of ``config``, packed or of one dtype.

    Raises:
        CheckpointError: naming the first tensor that is missing, unknown, or of another shape.
    """
    shapes = tensor_shapes(config)
    dtype = dense(weights, EMBEDDING).dtype if EMBEDDING in weights else None
    for name, shape in shapes.items():
        tensor = weights.get(name)
        if tensor is None:
            raise CheckpointError(f"tensor {name} is missing from the weights")
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"tensor {name} has shape {tuple(tensor.shape)}; this model needs {shape}"
            )
        if isinstance(tensor, torch.Tensor) and tensor.dtype != dtype:
            raise CheckpointError(
                f"tensor {name} is {tensor.dtype}, but {EMBEDDING} is {dtype}; use one dtype"
            )
    for name in weights:
        if name not in shapes:
            raise CheckpointError(f"tensor {name} is not part of this model")
