"""MXFP4 weights of a run: which tensors, their bytes on the weight plane, and both ends.

The learner rounds its fp32 master weights to bf16, packs them once, trains on the values of that
packing, and publishes codes and scales. The rollout engine computes with what it receives. Nothing
is quantised twice, so both sides hold the same numbers by construction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from consistency.quant import BLOCK, PackedTensor, QuantSettings, ScaleRule, pack
from integrations.errors import RecipeError
from integrations.trainer.model.config import ModelConfig
from integrations.trainer.model.weights import EMBEDDING, LM_HEAD, tensor_shapes
from integrations.trainer.recipe_sections import QuantisationRecipe
from weightplane.layout import TensorSpec

CODES_SUFFIX = ".codes"
SCALES_SUFFIX = ".scales"

# The embedding and the LM head stay in bf16 in every published recipe; the router decides which
# expert runs, and its rounding would flip experts.
_NEVER = (EMBEDDING, LM_HEAD)

Weights = dict[str, Tensor | PackedTensor]


@dataclass(frozen=True, slots=True)
class WeightQuantiser:
    """Quantises the chosen tensors of a model.

    Args:
        settings: the quantiser's.
        names: in-memory tensors that are quantised, in the order of the forward pass.
    """

    settings: QuantSettings
    names: tuple[str, ...]

    @classmethod
    def of(cls, config: ModelConfig, recipe: QuantisationRecipe | None) -> WeightQuantiser | None:
        """The quantiser that a recipe asks for; None without one.

        Raises:
            RecipeError: an exclusion names no tensor, a tensor's contraction axis has no whole
                blocks, or nothing is left to quantise.
        """
        if recipe is None:
            return None
        shapes = tensor_shapes(config)
        for name in recipe.exclude:
            if name not in shapes:
                raise RecipeError(
                    f"quantisation.exclude: {name!r} is no tensor of this model; use full names "
                    f"such as {next(reversed(shapes))!r}"
                )
        names = tuple(
            name
            for name, shape in shapes.items()
            if name not in recipe.exclude and _is_target(name, shape, recipe.targets)
        )
        if not names:
            raise RecipeError(
                f"quantisation.targets: this model has no {recipe.targets} left to quantise; use "
                "'linears', or remove the section"
            )
        for name in names:
            if shapes[name][-1] % BLOCK:
                raise RecipeError(
                    f"quantisation: {name} has shape {list(shapes[name])}, and its last dimension "
                    f"is no multiple of {BLOCK}; exclude it, or choose another model size"
                )
        return cls(QuantSettings(scale_rule=ScaleRule(recipe.scale_rule)), names)

    def specs(self, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> Iterator[TensorSpec]:
        """The tensors of the weight plane: codes and scales in place of a quantised tensor."""
        quantised = set(self.names)
        for name, shape in shapes.items():
            if name not in quantised:
                yield TensorSpec(name, shape, dtype)
                continue
            rows, width = shape[:-1], shape[-1]
            yield TensorSpec(name + CODES_SUFFIX, (*rows, width // 2), "float4_e2m1fn_x2")
            yield TensorSpec(name + SCALES_SUFFIX, (*rows, width // BLOCK), "float8_e8m0fnu")

    def pack(self, name: str, rounded: Tensor) -> PackedTensor:
        """Packs one bf16 tensor.

        Raises:
            InvalidInputError: it holds NaN or infinity.
        """
        return pack(rounded, self.settings, name=name)

    @staticmethod
    def to_wire(weights: Mapping[str, Tensor | PackedTensor]) -> dict[str, Tensor]:
        """The tensors of `specs`, sharing memory with `weights`."""
        tensors: dict[str, Tensor] = {}
        for name, weight in weights.items():
            if isinstance(weight, PackedTensor):
                tensors[name + CODES_SUFFIX] = weight.codes.view(torch.float4_e2m1fn_x2)
                tensors[name + SCALES_SUFFIX] = weight.scales.view(torch.float8_e8m0fnu)
            else:
                tensors[name] = weight.detach()
        return tensors

    def from_wire(self, tensors: Mapping[str, Tensor]) -> Weights:
        """The weights of a rollout engine, sharing memory with what the weight plane received."""
        weights: Weights = dict(tensors)
        for name in self.names:
            codes = tensors[name + CODES_SUFFIX].view(torch.uint8)
            scales = tensors[name + SCALES_SUFFIX].view(torch.uint8)
            del weights[name + CODES_SUFFIX], weights[name + SCALES_SUFFIX]
            weights[name] = PackedTensor(codes, scales, self.settings)
        return weights


def _is_target(name: str, shape: tuple[int, ...], targets: str) -> bool:
    if len(shape) == 3:
        return True
    return (
        targets == "linears"
        and len(shape) == 2
        and name not in _NEVER
        and not name.endswith(".mlp.gate.weight")
    )
