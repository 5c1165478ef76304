"""Puts the operators into a loaded vLLM model, and proves that nothing was left out."""

# vLLM is installed beside the engine tests only.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn
from vllm.model_executor.layers.activation import SiluAndMul as StockSiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.layernorm import RMSNorm as StockRmsNorm
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from consistency import kernels
from integrations.errors import EngineConfigError
from integrations.trainer.model.config import ModelConfig
from integrations.vllm.operators import (
    AttentionLayer,
    ExpertLayer,
    LinearMethod,
    LmHead,
    Operator,
    RmsNorm,
    RotaryEmbedding,
    SiluAndMul,
)
from integrations.vllm.options import VllmOptions

__all__ = ["PatchedModel", "patch_model", "weights_as_loaded"]

RouteSink = Callable[[int, torch.Tensor], None]
"""Called with a decoder layer index and expert ids ``[tokens, topk]``."""


@dataclass(slots=True)
class PatchedModel:
    """The operators of one model.

    Attributes:
        operators: all of them, in the order of the model's modules.
    """

    operators: list[Operator] = field(default_factory=list)

    def require_fired(self) -> None:
        """Raises unless every operator ran since it was installed.

        Raises:
            EngineConfigError: names the layers that computed something else.
        """
        silent = [f"{op.operation} of {op.where}" for op in self.operators if not op.fired]
        if silent:
            more = f" and {len(silent) - 3} more" if len(silent) > 3 else ""
            raise EngineConfigError(
                f"lockstep installed {len(self.operators)} hooks, but vLLM went round "
                f"{', '.join(silent[:3])}{more}: this build of vLLM is not supported"
            )


@contextmanager
def weights_as_loaded(options: VllmOptions) -> Iterator[None]:
    """While a model is loaded: weights stay as the checkpoint has them.

    vLLM would repack them for its own CPU kernels, and delete the originals.
    """
    chosen = frozenset(options.operations)

    def linear(method: Any, layer: Any) -> None:
        operation = "router" if _is_gate(layer.prefix) else "linear"
        if operation not in chosen:
            repack_linear(method, layer)

    repack_linear = UnquantizedLinearMethod.process_weights_after_loading
    replacements: dict[type, Callable[[Any, Any], None]] = {UnquantizedLinearMethod: linear}
    if "lm_head" in chosen:
        replacements[UnquantizedEmbeddingMethod] = _keep_weights
    if "experts" in chosen:
        replacements[UnquantizedFusedMoEMethod] = _keep_weights
    with ExitStack() as stack:
        for method, keep in replacements.items():
            stack.enter_context(mock.patch.object(method, "process_weights_after_loading", keep))
        yield


def _keep_weights(method: Any, layer: Any) -> None:
    del method, layer


def _is_gate(path: str) -> bool:
    """Whether a linear layer is the gate of a router, which the expert layer computes."""
    return path.endswith(".gate")


def patch_model(
    model: nn.Module, shape: ModelConfig, options: VllmOptions, record: RouteSink | None
) -> PatchedModel:
    """Installs the operators of `options`, on the instances of this model only.

    Args:
        model: as vLLM loaded it under `weights_as_loaded`.
        shape: of the model.
        options: which operations to route.
        record: where expert ids go, or None.

    Raises:
        EngineConfigError: a layer that the plugin does not know.
    """
    chosen = frozenset(options.operations)
    table = kernels.rotary_table(shape.head_dim, shape.max_positions, shape.rope_theta)
    patched = PatchedModel()
    add = patched.operators.append
    modules: list[tuple[str, Any]] = list(model.named_modules())
    for path, module in modules:
        kind = type(module)
        if isinstance(module, MoERunner):
            if chosen & {"router", "experts"} or record is not None:
                add(_patch_experts(path, module, chosen, options, record))
        elif isinstance(module, LinearBase):
            _patch_linear(path, module, chosen, options, add)
        elif kind is StockRmsNorm:
            if "rms_norm" in chosen:
                _set_forward(module, RmsNorm(path, module), add)
        elif kind is StockSiluAndMul:
            if "silu_and_mul" in chosen:
                _set_forward(module, SiluAndMul(path), add)
        elif isinstance(module, Attention):
            if "attention" in chosen:
                _set_forward(module, AttentionLayer(path, module), add)
        elif isinstance(module, LogitsProcessor):
            if module.scale != 1.0 or module.soft_cap is not None:
                raise EngineConfigError(
                    f"layer {path} scales its logits (scale {module.scale}, soft cap "
                    f"{module.soft_cap}), which the contract does not have"
                )
            if "lm_head" in chosen:
                head = LmHead(path, module.org_vocab_size)
                module._apply_head = head
                add(head)
        elif isinstance(module, RotaryEmbeddingBase):
            continue  # shared between layers: replaced in its owners below
        elif list(module.parameters(recurse=False)) and not _known(module):
            raise EngineConfigError(
                f"layer {path} is a {kind.__name__}, which lockstep has no kernel for"
            )
        if "rotary" in chosen and isinstance(
            getattr(module, "rotary_emb", None), RotaryEmbeddingBase
        ):
            rotary = RotaryEmbedding(f"{path}.rotary_emb", table)
            module.rotary_emb = rotary
            add(rotary)
    return patched


def _known(module: nn.Module) -> bool:
    """Layers with parameters that another operator computes with, or that only look rows up."""
    names = {name for name, _ in module.named_parameters(recurse=False)}
    return isinstance(module, VocabParallelEmbedding) or names <= {"w13_weight", "w2_weight"}


def _set_forward(module: Any, operator: Any, add: Callable[[Operator], None]) -> None:
    module.forward = operator
    add(operator)


def _patch_linear(
    path: str,
    module: Any,
    chosen: frozenset[str],
    options: VllmOptions,
    add: Callable[[Operator], None],
) -> None:
    if not isinstance(module.quant_method, UnquantizedLinearMethod):
        raise EngineConfigError(
            f"layer {path} has the weights of {type(module.quant_method).__name__}: lockstep "
            "computes with unquantised weights only"
        )
    if "linear" in chosen and not _is_gate(path):
        module.quant_method = LinearMethod(path, options.tp_invariant)
        add(module.quant_method)


def _patch_experts(
    path: str,
    runner: Any,
    chosen: frozenset[str],
    options: VllmOptions,
    record: RouteSink | None,
) -> Operator:
    if runner._shared_experts is not None or runner.routed_input_transform is not None:
        raise EngineConfigError(
            f"layer {path} has shared experts, which lockstep has no kernel for"
        )
    layer = _layer_index(path)
    sink = None if record is None else (lambda ids: record(layer, ids))
    operator = ExpertLayer(path, runner, chosen, options.tp_invariant, sink)
    runner.forward = operator
    return operator


def _layer_index(path: str) -> int:
    """The number after ``layers`` in a module's path."""
    parts = path.split(".")
    return int(parts[parts.index("layers") + 1])
