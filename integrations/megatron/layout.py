"""What the ranks of a Megatron-Core model hold, for the weight plane: no rank gathers anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from integrations.errors import SwapError
from integrations.megatron.weights import Place, parameter_pieces
from integrations.trainer.model.config import ModelConfig
from integrations.trainer.model.weights import EMBEDDING, LM_HEAD, checkpoint_shapes
from weightplane import TensorSpec
from weightplane.cluster_layout import ClusterLayout, Slice
from weightplane.sharding import RankBuilder

__all__ = ["fill_arena", "ranks_layout"]


def ranks_layout(
    shape: ModelConfig, places: Mapping[str, Place], dtype: torch.dtype = torch.bfloat16
) -> ClusterLayout:
    """The layout of a model on its ranks; a pure function, the same wherever it is computed.

    Tensors have the names of the checkpoint, so that an engine's loader can be recorded against
    them. Each parameter is a storage of its own, under Megatron-Core's name.

    Args:
        shape: of the whole model.
        places: of the ranks, by name, in their order; data-parallel ranks that hold the same only
            share the load.
        dtype: of the parameters.
    """
    kind = str(dtype).removeprefix("torch.")
    whole = {name: TensorSpec(name, size, kind) for name, size in checkpoint_shapes(shape).items()}
    builders = []
    for rank, place in places.items():
        builder = RankBuilder(rank)
        for parameter, pieces in parameter_pieces(shape, place).items():
            row_bytes = dtype.itemsize * int(numpy.prod(pieces[0].shape[1:], dtype=int))
            slices = [
                Slice(piece.tensor, piece.start, piece.shape, parameter, piece.row * row_bytes)
                for piece in pieces
            ]
            rows = sum(piece.shape[0] for piece in pieces)
            builder.add(
                parameter, rows * row_bytes, slices, [whole[piece.tensor] for piece in pieces]
            )
        builders.append(builder)
    held = {spec.name: spec for builder in builders for spec in builder.tensors}
    ties = {LM_HEAD: EMBEDDING} if shape.tie_word_embeddings else {}
    return ClusterLayout.build(
        tuple(held.values()), [builder.layout() for builder in builders], ties
    )


def fill_arena(
    model: Any, layout: ClusterLayout, rank: str, arena: NDArray[numpy.uint8] | None = None
) -> NDArray[numpy.uint8]:
    """Copies a rank's parameters to the places that the layout gives them.

    Args:
        model: this rank's `GPTModel`, unwrapped, on the CPU.
        layout: from `ranks_layout`.
        rank: its name there.
        arena: uint8 ``[arena_bytes]`` to write to; None makes one.

    Returns:
        The arena, for `PlanEndpoint.publish`.

    Raises:
        SwapError: a rank that the layout does not have, or a model with other parameters.
    """
    if rank not in layout.ranks:
        raise SwapError(f"rank {rank!r} is not in the layout: use one of {', '.join(layout.ranks)}")
    number = layout.ranks.index(rank)
    if arena is None:
        arena = numpy.zeros(int(layout.arena_bytes[number]), numpy.uint8)
    parameters = dict(model.named_parameters())
    for storage in layout.storages(number):
        parameter = parameters.pop(storage.name, None)
        if parameter is None or parameter.nbytes != storage.byte_count:
            have = "missing" if parameter is None else f"{parameter.nbytes} bytes"
            raise SwapError(
                f"parameter {storage.name} is {have}, the layout of {rank} wants "
                f"{storage.byte_count} bytes: describe the model that this rank has"
            )
        values = parameter.detach().contiguous().flatten().view(torch.uint8).numpy()
        arena[storage.offset : storage.offset + storage.byte_count] = values
    if parameters:
        raise SwapError(f"parameter {next(iter(parameters))} has no place in the layout of {rank}")
    return arena
