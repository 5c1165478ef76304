"""One decoder definition for the rollout engine and the learner, and its checkpoints."""

from __future__ import annotations

from integrations.trainer.model.attention import (
    AttentionContext,
    KeyValueCache,
    PagedAttention,
    VarlenAttention,
)
from integrations.trainer.model.checkpoint import load_checkpoint, save_checkpoint
from integrations.trainer.model.config import ModelConfig
from integrations.trainer.model.decoder import Decoder, RoutingHook, RoutingOverride
from integrations.trainer.model.weights import (
    init_random,
    lm_head_weight,
    tensor_shapes,
    validate_weights,
)

__all__ = [
    "AttentionContext",
    "Decoder",
    "KeyValueCache",
    "ModelConfig",
    "PagedAttention",
    "RoutingHook",
    "RoutingOverride",
    "VarlenAttention",
    "init_random",
    "lm_head_weight",
    "load_checkpoint",
    "save_checkpoint",
    "tensor_shapes",
    "validate_weights",
]
