"""`patch` and `unpatch`: the forward of every module, on the instance, and nothing else.

A patched module carries its replacement in its own ``__dict__``; its class, its parameters and
other models are not touched. `unpatch` takes the replacements out again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import transformers
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask

from consistency import kernels
from consistency.contract import NumericsContract
from consistency.errors import UnsupportedError
from integrations.errors import ModelConfigError
from integrations.trainer.model.config import ARCHITECTURES, ModelConfig
from integrations.transformers.operators import (
    Attention,
    Experts,
    Linear,
    LmHead,
    Mlp,
    RmsNorm,
    Router,
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
"""What `patch` can route, one name per kind of operation."""

_PREFIXES: Final[Mapping[str, str]] = {
    "llama": "Llama",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
}
"""How the class names of an architecture begin."""

_MARK: Final = "_lockstep_patch"
# With this name the models hand the padding mask on as it is, two-dimensional, and build none.
_ATTENTION_NAME: Final = "lockstep"
ALL_MASK_ATTENTION_FUNCTIONS.register(_ATTENTION_NAME, flash_attention_mask)


@dataclass(frozen=True, slots=True)
class _Patch:
    """What `unpatch` needs."""

    modules: tuple[nn.Module, ...]
    attention_name: str | None


def patch(
    model: Any,
    *,
    contract: NumericsContract | None = None,
    operations: Collection[str] | None = None,
) -> None:
    """See `consistency.patch`. Operations are named in `OPERATIONS`.

    Raises:
        UnsupportedError: not an unpatched Llama, Qwen3 or Qwen3-MoE causal language model on the
            CPU, a module in it that nothing is known of, or a contract of another dtype.
    """
    config = _supported_config(model)
    chosen = _chosen(operations)
    contract = _contract(model, contract)
    settings: Any = model.config
    replacements = dict(_replacements(model, config, contract, chosen))
    attention_name = None
    if "attention" in chosen:
        attention_name = settings._attn_implementation
        settings._attn_implementation = _ATTENTION_NAME
    for module, forward in replacements.items():
        module.forward = forward
    setattr(model, _MARK, _Patch(tuple(replacements), attention_name))


def unpatch(model: Any) -> None:
    """See `consistency.unpatch`."""
    state = getattr(model, _MARK, None)
    if not isinstance(state, _Patch):
        raise UnsupportedError(f"model is a {type(model).__name__} that is not patched: patch it")
    for module in state.modules:
        del module.forward
    if state.attention_name is not None:
        model.config._attn_implementation = state.attention_name
    delattr(model, _MARK)


def _supported_config(model: Any) -> ModelConfig:
    """The model's shape, if every part of it has a kernel."""
    known = ", ".join(ARCHITECTURES.values())
    if not isinstance(model, transformers.PreTrainedModel):
        raise UnsupportedError(f"model is a {type(model).__name__}: pass one of {known}")
    if type(model).__name__ not in ARCHITECTURES.values():
        raise UnsupportedError(f"model is a {type(model).__name__}: patches exist for {known}")
    if getattr(model.config, "attention_dropout", 0.0):
        raise UnsupportedError(
            f"model.config: attention_dropout is {model.config.attention_dropout}, which the "
            "kernels do not have: set it to 0.0"
        )
    if _MARK in vars(model):
        raise UnsupportedError("model is patched already: unpatch it first")
    try:
        return ModelConfig.from_dict(model.config.to_dict())
    except ModelConfigError as error:
        raise UnsupportedError(f"model.config: {error}") from error


def _chosen(operations: Collection[str] | None) -> frozenset[str]:
    chosen = frozenset(OPERATIONS if operations is None else operations)
    for name in sorted(chosen.difference(OPERATIONS)):
        raise UnsupportedError(f"operations names {name!r}: use {', '.join(OPERATIONS)}")
    return chosen


def _contract(model: nn.Module, contract: NumericsContract | None) -> NumericsContract:
    """The contract to keep, once the parameters are such that it can be kept."""
    for name, parameter in model.named_parameters():
        if parameter.device.type != "cpu":
            raise UnsupportedError(
                f"parameter {name} is on {parameter.device}: these kernels run on the CPU; "
                "move the model there"
            )
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    if contract is None:
        contract = NumericsContract(compute_dtype=dtype)
    contract.require_supported()
    for name, parameter in model.named_parameters():
        if parameter.dtype != contract.torch_dtype:
            raise UnsupportedError(
                f"parameter {name} is {parameter.dtype}, the contract computes in "
                f"{contract.compute_dtype}: load the model with that dtype"
            )
    return contract


def _replacements(
    model: Any, config: ModelConfig, contract: NumericsContract, chosen: frozenset[str]
) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """Every module that gets another forward, and that forward.

    Raises:
        UnsupportedError: a module of a kind that this release does not know: what it computes would
            stay outside the contract.
    """
    prefix = _PREFIXES[config.model_type]
    source = sys.modules[type(model).__module__]
    table = None
    if "rotary" in chosen:
        table = kernels.rotary_table(config.head_dim, config.max_positions, config.rope_theta)
    stock = None
    if "attention" not in chosen:
        stock = source.ALL_ATTENTION_FUNCTIONS.get_interface(
            model.config._attn_implementation, source.eager_attention_forward
        )
    whole = contract.tp_invariant

    def attention(module: Any) -> Attention:
        return Attention(module, table, source.apply_rotary_pos_emb, stock)

    def linear(module: Any) -> Linear | LmHead:
        return LmHead(module) if module is model.lm_head else Linear(module, whole)

    makers: dict[str, tuple[str, Callable[[Any], Callable[..., Any]]]] = {
        f"{prefix}RMSNorm": ("rms_norm", RmsNorm),
        f"{prefix}MLP": ("silu_and_mul", Mlp),
        f"{prefix}TopKRouter": ("router", lambda module: Router(module, whole)),
        f"{prefix}Experts": ("experts", lambda module: Experts(module, whole)),
    }
    containers = {
        type(model).__name__,
        *(f"{prefix}{part}" for part in ("Model", "DecoderLayer", "SparseMoeBlock")),
        f"{prefix}RotaryEmbedding",
        "Embedding",
        "ModuleList",
        "SiLU",
        "SiLUActivation",
    }
    for name, module in model.named_modules():
        kind = type(module).__name__
        if "forward" in vars(module):
            raise UnsupportedError(f"module {name} has a forward of its own: undo that patch first")
        if type(module) is nn.Linear:
            if ("lm_head" if module is model.lm_head else "linear") in chosen:
                yield module, linear(module)
        elif kind == f"{prefix}Attention":
            if chosen & {"rotary", "attention"}:
                yield module, attention(module)
        elif kind in makers:
            operation, make = makers[kind]
            if operation in chosen:
                yield module, make(module)
        elif kind not in containers:
            raise UnsupportedError(
                f"module {name} is a {kind}, which has no kernel: merge or remove it before "
                "the model is patched"
            )
