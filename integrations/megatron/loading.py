"""Reads a Hugging Face checkpoint into the `GPTModel` of one rank; each rank reads its own part."""

# Megatron-Core is installed beside the engine tests only.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from integrations.errors import CheckpointError
from integrations.megatron.model import ModelOptions, build_model
from integrations.megatron.weights import Piece, Place, parameter_pieces
from integrations.trainer.model.checkpoint import CheckpointReader
from integrations.trainer.model.config import ModelConfig
from integrations.trainer.model.weights import (
    LM_HEAD,
    checkpoint_parts,
    checkpoint_shapes,
    tensor_shapes,
)

__all__ = ["current_place", "load_model", "load_weights"]


def current_place() -> Place:
    """Where this process stands, as `parallel_state` knows it."""
    return Place(
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pipeline_size=parallel_state.get_pipeline_model_parallel_world_size(),
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
        expert_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_rank=parallel_state.get_expert_tensor_parallel_rank(),
        expert_tensor_size=parallel_state.get_expert_tensor_parallel_world_size(),
    )


def load_model(folder: str | Path, options: ModelOptions | None = None) -> Any:
    """This rank's `GPTModel` with the weights of a Llama, Qwen3 or Qwen3-MoE checkpoint.

    Args:
        folder: ``config.json`` and safetensors, as transformers writes them.
        options: what the checkpoint does not say.

    Raises:
        ModelConfigError, CheckpointError: of the folder.
        EngineConfigError: as `build_model`.
    """
    shape = ModelConfig.load(folder)
    model = build_model(shape, options or ModelOptions())
    load_weights(model, shape, folder)
    return model


def load_weights(model: Any, shape: ModelConfig, folder: str | Path) -> None:
    """Fills every parameter of `model` from the checkpoint.

    Args:
        model: a `GPTModel` of Megatron-Core's local modules on this rank.
        shape: of the whole model.
        folder: of the checkpoint.

    Raises:
        CheckpointError: a tensor is missing, damaged or of another shape, or a parameter of the
            model has no counterpart in the checkpoint.
    """
    parameters = dict(model.named_parameters())
    pieces = parameter_pieces(shape, current_place())
    unknown = sorted(parameters.keys() ^ pieces.keys())
    if unknown:
        raise CheckpointError(
            f"parameter {unknown[0]} is on one side only, of the model or of a {shape.model_type} "
            "checkpoint: build the model with integrations.megatron.build_model"
        )
    sources = _Sources.of(shape)
    with ExitStack() as stack, torch.no_grad():
        reader = CheckpointReader(Path(folder), stack)
        reader.refuse_unread(ignore=sources.names)
        for name, parameter in parameters.items():
            _fill(reader, sources, name, parameter, pieces[name])


@dataclass(frozen=True, slots=True)
class _Sources:
    """Where checkpoints keep the tensors of one model: each by itself, or experts stacked.

    Attributes:
        shapes: of every tensor by itself, and of every stack.
        stacks: of a tensor that may be stacked: the stack, and where in it the tensor begins.
    """

    shapes: Mapping[str, tuple[int, ...]]
    stacks: Mapping[str, tuple[str, tuple[int, ...]]]

    @classmethod
    def of(cls, shape: ModelConfig) -> _Sources:
        stacks = {
            part.name: (stack, (part.expert, part.start, 0))
            for stack, parts in checkpoint_parts(shape).items()
            for part in parts
            if part.expert is not None
        }
        return cls(tensor_shapes(shape) | checkpoint_shapes(shape), stacks)

    @property
    def names(self) -> set[str]:
        """Every name that a checkpoint of the model may hold."""
        return {*self.shapes, LM_HEAD}


def _fill(
    reader: CheckpointReader,
    sources: _Sources,
    name: str,
    parameter: torch.Tensor,
    pieces: tuple[Piece, ...],
) -> None:
    rows = sum(piece.shape[0] for piece in pieces)
    if tuple(parameter.shape) != (rows, *pieces[0].shape[1:]):
        raise CheckpointError(
            f"parameter {name} has shape {tuple(parameter.shape)}, the checkpoint's share of this "
            f"rank is {(rows, *pieces[0].shape[1:])}"
        )
    for piece in pieces:
        source, start = piece.tensor, piece.start
        if source not in reader and source in sources.stacks:
            source, first = sources.stacks[source]
            start = (first[0], first[1] + start[0], first[2] + start[1])
        target = parameter[piece.row : piece.row + piece.shape[0]]
        reader.read_box_into(source, sources.shapes[source], start, target)
