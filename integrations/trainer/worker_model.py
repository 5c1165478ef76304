"""The model of a run as a worker needs it: configuration, weights, layout, contract, tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from consistency.contract import NumericsContract
from integrations.errors import RunError
from integrations.trainer.messages import Hello
from integrations.trainer.model import (
    Decoder,
    ModelConfig,
    init_random,
    load_checkpoint,
    save_checkpoint,
    tensor_shapes,
)
from integrations.trainer.model.weights import Weight
from integrations.trainer.model_source import ModelSource, resolve_model
from integrations.trainer.quantisation import WeightQuantiser
from integrations.trainer.recipe import Recipe, parse_recipe
from integrations.trainer.tokenizer import Tokenizer, load_tokenizer
from integrations.trainer.worker import ControlLink
from weightplane.layout import Layout, TensorSpec

COMPUTE_DTYPE = torch.bfloat16
TOKENIZER_FILES = (
    "tokenizer",
    "special_tokens_map",
    "vocab",
    "merges",
    "chat_template",
    "generation_config",
)


def contract_of(recipe: Recipe) -> NumericsContract:
    """The numerics contract that a recipe asks for."""
    return NumericsContract(
        compute_dtype=str(COMPUTE_DTYPE).removeprefix("torch."),
        tp_invariant=recipe.contract.tp_invariant,
    )


def recipe_to_wire(recipe: Recipe) -> str:
    return json.dumps(recipe.to_mapping())


def recipe_from_wire(text: str) -> Recipe:
    return parse_recipe(json.loads(text))


Start = TypeVar("Start")


def first_message(link: ControlLink, expected: type[Start]) -> Start:
    """The message that a worker begins with."""
    message = link.receive()
    if not isinstance(message, expected):
        raise RunError(f"a worker began with {type(message).__name__}, not {expected.__name__}")
    return message


@dataclass(frozen=True)
class WorkerModel:
    """The model that a recipe names.

    Attributes:
        recipe: the resolved recipe.
        source: where the model comes from, resolved.
        config: shape of the model.
        quantiser: of the weights that are trained and served quantised, or None.
    """

    recipe: Recipe
    source: ModelSource
    config: ModelConfig
    quantiser: WeightQuantiser | None = None

    @classmethod
    def of(cls, recipe: Recipe) -> WorkerModel:
        source = resolve_model(recipe)
        config = ModelConfig.from_dict(source.config)
        return cls(recipe, source, config, WeightQuantiser.of(config, recipe.quantisation))

    @cached_property
    def contract(self) -> NumericsContract:
        return contract_of(self.recipe)

    @cached_property
    def layout(self) -> Layout:
        """What learner and rollout engines exchange; both derive it from the configuration."""
        dtype = str(COMPUTE_DTYPE).removeprefix("torch.")
        shapes = tensor_shapes(self.config)
        if self.quantiser is not None:
            return Layout.whole(self.quantiser.specs(shapes, dtype))
        return Layout.whole(TensorSpec(name, shape, dtype) for name, shape in shapes.items())

    def hello(self, role: str) -> Hello:
        """What a worker introduces itself with."""
        return Hello(
            role=role,
            contract_digest=self.contract.digest(),
            layout_digest=self.layout.digest,
            parameters=self.config.parameters,
            model_bytes=self.layout.byte_count,
        )

    def to_wire(self, served: Mapping[str, Weight]) -> dict[str, Tensor]:
        """The tensors of `layout`, from the learner's served weights."""
        return WeightQuantiser.to_wire(served)

    def from_wire(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Weight]:
        """The weights of a rollout engine, from tensors of `layout`."""
        return tensors if self.quantiser is None else self.quantiser.from_wire(tensors)

    def decoder(self) -> Decoder:
        return Decoder(self.config, self.contract)

    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.recipe.tokenizer, self.source.folder)

    def initial_weights(self) -> dict[str, Tensor]:
        """The weights that the model starts with, bf16: a checkpoint's, or drawn from the seed."""
        if self.source.folder is None:
            return init_random(self.config, self.source.seed, COMPUTE_DTYPE)
        return load_checkpoint(self.source.folder, COMPUTE_DTYPE)[1]

    def save(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Write a checkpoint that other tools load, with the tokenizer files of its source."""
        plain = {name: weight.detach() for name, weight in weights.items()}
        save_checkpoint(folder, self.config, plain)
        if self.source.folder is not None:
            for path in sorted(self.source.folder.iterdir()):
                if path.name.startswith(TOKENIZER_FILES):
                    shutil.copy2(path, folder / path.name)
