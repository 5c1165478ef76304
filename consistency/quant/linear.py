"""Quantised weights in models: which ones, fake quantisation, products with packed weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, get_args

import torch
from torch import nn
from torch.nn.utils import parametrize

from consistency import kernels
from consistency.errors import InvalidInputError
from consistency.kernels.moe import GroupedProduct, routed_experts
from consistency.quant.mxfp4 import PackedTensor
from consistency.quant.qdq import FakeQuant, Gradient
from consistency.quant.settings import QuantSettings

Targets = Literal["experts", "linears"]
"""experts: weights below a module called ``experts``. linears: those, and every ``nn.Linear``."""

Weight = torch.Tensor | PackedTensor


_PARAMETRIZATIONS = ".parametrizations."


def quantised_linear(
    x: torch.Tensor,
    weight: Weight,
    *,
    out_dtype: torch.dtype | None = None,
    tp_invariant: bool = False,
) -> torch.Tensor:
    """`kernels.linear` for a weight that may be packed; the bits are those of its values."""
    if isinstance(weight, PackedTensor):
        return kernels.mxfp4_linear(
            x, weight.codes, weight.scales, out_dtype=out_dtype, tp_invariant=tp_invariant
        )
    return kernels.linear(x, weight, out_dtype=out_dtype, tp_invariant=tp_invariant)


def quantised_moe_experts(
    x: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    tp_invariant: bool = False,
) -> torch.Tensor:
    """`kernels.moe_experts` for weights of which either may be packed; bits as of their values."""
    if isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor):
        return kernels.moe_experts(x, gate_up, down, weights, ids, tp_invariant=tp_invariant)
    return routed_experts(
        x,
        weights,
        ids,
        gate_up.shape,
        down.shape,
        _product(gate_up, None, tp_invariant),
        _product(down, torch.float32, tp_invariant),
    )


def _product(weight: Weight, out_dtype: torch.dtype | None, tp_invariant: bool) -> GroupedProduct:
    if isinstance(weight, PackedTensor):
        return lambda rows, offsets: kernels.mxfp4_grouped_linear(
            rows,
            weight.codes,
            weight.scales,
            offsets,
            out_dtype=out_dtype,
            tp_invariant=tp_invariant,
        )
    return lambda rows, offsets: kernels.grouped_linear(
        rows, weight, offsets, out_dtype=out_dtype, tp_invariant=tp_invariant
    )


def target_weights(
    model: nn.Module, targets: Targets, *, exclude: Iterable[str] = ()
) -> Iterator[tuple[str, nn.Module, str]]:
    """The weights that `quantise_modules` would quantise.

    A weight is one of `targets`; it has two dimensions (``nn.Linear``) or three (stacked experts,
    contraction axis last).

    Args:
        model: any model.
        targets: which weights.
        exclude: full names of modules or weights to leave alone (``model.layers.0.mlp.gate``). A
            name excludes exactly what it names and what lies below it; it is never matched as a
            part of another name.

    Yields:
        The weight's full name, its module, and its name in the module.

    Raises:
        InvalidInputError: unknown targets; a name in `exclude` that the model does not have;
            stacked experts whose contraction axis is not the last one.
    """
    if targets not in get_args(Targets):
        known = " or ".join(map(repr, get_args(Targets)))
        raise InvalidInputError(f"targets is {targets!r}: use {known}")
    excluded = set(exclude)
    known_names = {name for name, _ in model.named_modules()}
    known_names |= {name for name, _ in model.named_parameters()}
    for name in sorted(excluded - known_names):
        raise InvalidInputError(
            f"exclude names {name!r}, which the model does not have: use full names, as "
            "named_modules() and named_parameters() give them"
        )
    for module_name, module in model.named_modules():
        path = module_name.split(".")
        if any(".".join(path[: i + 1]) in excluded for i in range(len(path))):
            continue
        below_experts = "experts" in path
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{module_name}.{name}".lstrip(".")
            if full in excluded or parameter.dim() < 2:
                continue
            stacked = below_experts and parameter.dim() == 3
            if not stacked and not (
                isinstance(module, nn.Linear) and (below_experts or targets == "linears")
            ):
                continue
            if stacked and getattr(module, "is_transposed", False):
                raise InvalidInputError(
                    f"{full} has shape {tuple(parameter.shape)} with its contraction axis first "
                    "(is_transposed): blocks lie along the last axis; store [experts, out, in]"
                )
            yield full, module, name


def quantise_modules(
    model: nn.Module,
    settings: QuantSettings,
    *,
    targets: Targets = "experts",
    exclude: Iterable[str] = (),
    gradient: Gradient = "identity",
    out_dtype: torch.dtype = torch.bfloat16,
) -> tuple[str, ...]:
    """Makes a model compute with the QDQ of its target weights; undone by `restore_modules`.

    Args:
        model: any model; its parameters stay the ones that an optimizer holds.
        settings: the quantiser's.
        targets, exclude: as in `target_weights`.
        gradient: what saturated elements receive, see `FakeQuant`.
        out_dtype: dtype of the QDQ weights.

    Returns:
        The names of the weights, in the order of the model.

    Raises:
        InvalidInputError: as `target_weights`; no weight is a target; one is quantised already or
            cannot be (its last dimension is no multiple of 32, NaN). The model is then unchanged.
    """
    for name, module in model.named_modules():
        if isinstance(module, FakeQuant):
            raise InvalidInputError(
                f"{name} is a FakeQuant: the model is quantised already; restore_modules() first"
            )
    chosen = list(target_weights(model, targets, exclude=exclude))
    if not chosen:
        raise InvalidInputError(
            f"the model has no weights among its {targets}: nothing to quantise"
        )
    quantisers = []
    for full, module, name in chosen:
        quantiser = FakeQuant(settings, gradient=gradient, out_dtype=out_dtype, name=full)
        quantiser(getattr(module, name))
        quantisers.append(quantiser)
    for (_, module, name), quantiser in zip(chosen, quantisers, strict=True):
        parametrize.register_parametrization(module, name, quantiser, unsafe=True)
    return tuple(full for full, _, _ in chosen)


def packed_weights(model: nn.Module) -> dict[str, Weight]:
    """The weights of a model that `quantise_modules` quantised, as `export_checkpoint` takes them.

    Args:
        model: with `FakeQuant` parametrizations.

    Returns:
        By the names of the model without quantisation, in its order: what a `FakeQuant` shows is
        packed, so its bytes stand for the values that the model trains on; all else is as it is.

    Raises:
        InvalidInputError: a weight with another parametrization beside `FakeQuant`, or none with
            it; a weight that cannot be packed (NaN).
    """
    weights: dict[str, Weight] = {}
    packed = 0
    for key, tensor in model.state_dict().items():
        # The dot in front also finds those of the model itself.
        path, found, rest = f".{key}".partition(_PARAMETRIZATIONS)
        if not found:
            weights[key] = tensor
            continue
        name = rest.removesuffix(".original")
        chain = list(model.get_submodule(f"{path}{_PARAMETRIZATIONS}{name}"[1:]).children())
        full = f"{path}.{name}".lstrip(".")
        if len(chain) != 1 or not isinstance(chain[0], FakeQuant):
            raise InvalidInputError(
                f"{full} has the parametrizations {[type(step).__name__ for step in chain]}: only "
                "a single FakeQuant says what an engine has to serve"
            )
        weights[full] = chain[0].packed(tensor)
        packed += 1
    if not packed:
        raise InvalidInputError("the model has no FakeQuant: call quantise_modules() first")
    return weights


def restore_modules(model: nn.Module) -> None:
    """Removes every `FakeQuant`; the weights are the unquantised ones again."""
    for module in list(model.modules()):
        if not parametrize.is_parametrized(module):
            continue
        for name, chain in list(module.parametrizations.items()):  # type: ignore[union-attr]
            if any(isinstance(step, FakeQuant) for step in chain):  # type: ignore[union-attr]
                parametrize.remove_parametrizations(module, name, leave_parametrized=False)
