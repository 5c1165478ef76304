"""`patch` and `unpatch`: the forward of every module, on the instance, and nothing else.

A patched module carries its replacement in its own ``__dict__``; its class, its parameters and
other models are not touched. `unpatch` takes the replacements out again.
"""

# Megatron-Core is installed beside the engine tests only.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final

from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from torch import nn

from consistency import kernels
from consistency.contract import NumericsContract
from consistency.errors import UnsupportedError
from integrations.megatron.attention import Attention
from integrations.megatron.compatibility import core_model, require_supported, rotary_settings
from integrations.megatron.experts import MoeExperts, Router
from integrations.megatron.model import SequenceParallelRmsNorm
from integrations.megatron.operators import (
    ColumnLinear,
    Embedding,
    LmHead,
    Loss,
    Mlp,
    Norm,
    RowLinear,
)

__all__ = ["OPERATIONS", "patch", "unpatch"]

OPERATIONS: Final = (
    "linear",
    "rms_norm",
    "silu_and_mul",
    "rotary",
    "attention",
    "router",
    "experts",
    "lm_head",
)
"""What `patch` can route, one name per kind of operation; the embedding goes with "linear"."""

_MARK: Final = "_lockstep_patch"
_LOSS: Final = "compute_language_model_loss"

_Forward = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _Patch:
    """What `unpatch` needs."""

    modules: tuple[nn.Module, ...]


def patch(
    model: Any,
    *,
    contract: NumericsContract | None = None,
    operations: Collection[str] | None = None,
) -> None:
    """See `consistency.patch`. Operations are named in `OPERATIONS`.

    Args:
        model: a `GPTModel` of Megatron-Core's local modules, or a wrapper around one; each rank of
            a parallel model patches its own part.
        contract: by default that of the parameters' dtype, `tp_invariant` if there are several
            tensor-parallel ranks.
        operations: by default all.

    Raises:
        EngineConfigError: another version of Megatron-Core.
        UnsupportedError: a setting, parameter or module that cannot be honoured. The model is then
            as it was.
    """
    model = core_model(model)
    chosen = _chosen(operations)
    if _MARK in vars(model):
        raise UnsupportedError("model is patched already: unpatch it first")
    if contract is None:
        contract = NumericsContract(
            compute_dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
            tp_invariant=model.config.tensor_model_parallel_size > 1,
        )
    contract.require_supported()
    require_supported(model, contract)
    replacements = list(_replacements(model, contract, chosen))
    for module, forward in replacements:
        module.forward = forward
    if model.post_process and "lm_head" in chosen:
        setattr(model, _LOSS, Loss(model.output_layer))
    setattr(model, _MARK, _Patch(tuple(module for module, _ in replacements)))


def unpatch(model: Any) -> None:
    """See `consistency.unpatch`."""
    model = core_model(model)
    state = vars(model).get(_MARK)
    if not isinstance(state, _Patch):
        raise UnsupportedError(f"model is a {type(model).__name__} that is not patched: patch it")
    for module in state.modules:
        del module.forward
    if _LOSS in vars(model):
        delattr(model, _LOSS)
    delattr(model, _MARK)


def _chosen(operations: Collection[str] | None) -> frozenset[str]:
    chosen = frozenset(OPERATIONS if operations is None else operations)
    for name in sorted(chosen.difference(OPERATIONS)):
        raise UnsupportedError(f"operations names {name!r}: use {', '.join(OPERATIONS)}")
    return chosen


def _replacements(
    model: Any, contract: NumericsContract, chosen: frozenset[str]
) -> Iterator[tuple[Any, _Forward]]:
    """Every module that gets another forward, and that forward.

    Raises:
        UnsupportedError: a module with parameters of a kind that this release does not know.
    """
    whole = contract.tp_invariant
    table = None
    if "rotary" in chosen:
        table = kernels.rotary_table(*rotary_settings(model))

    def attention(module: Any) -> Attention:
        if type(module.core_attention) is not DotProductAttention:
            kind = type(module.core_attention).__name__
            raise UnsupportedError(
                f"the core attention is a {kind}: build the model with the local layer spec"
            )
        return Attention(module, table, "attention" in chosen)

    rules: dict[type, tuple[frozenset[str], Callable[[Any], _Forward]]] = {
        ColumnParallelLinear: (frozenset({"linear"}), lambda module: ColumnLinear(module, whole)),
        RowParallelLinear: (frozenset({"linear"}), lambda module: RowLinear(module, whole)),
        VocabParallelEmbedding: (frozenset({"linear"}), Embedding),
        nn.RMSNorm: (frozenset({"rms_norm"}), Norm),
        SequenceParallelRmsNorm: (frozenset({"rms_norm"}), Norm),
        nn.LayerNorm: (frozenset({"rms_norm"}), Norm),
        MLP: (frozenset({"silu_and_mul"}), Mlp),
        SelfAttention: (frozenset({"rotary", "attention"}), attention),
        TopKRouter: (frozenset({"router"}), lambda module: Router(module, whole)),
        MoELayer: (frozenset({"experts"}), lambda module: MoeExperts(module, whole)),
    }
    gate_up = {id(module.linear_fc1) for module in model.modules() if isinstance(module, MLP)}
    inside_experts = {
        id(part)
        for module in model.modules()
        if isinstance(module, SequentialMLP)
        for part in module.modules()
    }
    for name, module in model.named_modules():
        if "forward" in vars(module):
            raise UnsupportedError(f"module {name} has a forward of its own: undo that patch first")
        kind = type(module)
        if module is getattr(model, "output_layer", None):
            if "lm_head" in chosen:
                yield module, LmHead(module)
        elif id(module) in inside_experts:
            continue  # the expert layer computes with their weights
        elif id(module) in gate_up and kind is ColumnParallelLinear:
            if "linear" in chosen:
                yield module, ColumnLinear(module, whole, projections=2)
        elif kind in rules:
            names, make = rules[kind]
            if names & chosen:
                yield module, make(module)
        elif next(module.parameters(recurse=False), None) is not None:
            raise UnsupportedError(
                f"module {name} is a {kind.__name__}, which has no kernel: build the model with "
                "the local layer spec of Megatron-Core"
            )
