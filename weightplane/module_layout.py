"""Layouts of torch modules, whole or sharded as DTensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from weightplane.cluster_layout import ClusterLayout
from weightplane.errors import LayoutError
from weightplane.layout import TensorSpec
from weightplane.sharding import RankBuilder, chunk
from weightplane.slices import Slice

__all__ = ["local_box", "module_layout", "module_tensors"]


def module_tensors(module: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Parameters and persistent buffers by name, and ties (alias -> name) among them.

    Two names of one tensor are a tie; the name that comes first is kept.
    """
    tensors: dict[str, torch.Tensor] = {}
    ties: dict[str, str] = {}
    names: dict[int, str] = {}
    persistent = module.state_dict(keep_vars=True)
    for name, tensor in persistent.items():
        if not isinstance(tensor, torch.Tensor):
            raise LayoutError(f"{name!r} of the module is a {type(tensor).__name__}, no tensor")
        first = names.setdefault(id(tensor), name)
        if first == name:
            tensors[name] = tensor
        else:
            ties[name] = first
    return tensors, ties


def module_layout(module: nn.Module, rank: str) -> ClusterLayout:
    """What one rank holds of a module; `ClusterLayout.concatenate` joins the ranks'.

    Args:
        module: parameters may be DTensors; their device does not matter.
        rank: name of the rank.

    Raises:
        LayoutError: the module has no tensors, or one that cannot be described.
    """
    tensors, ties = module_tensors(module)
    builder = RankBuilder(rank)
    for name, tensor in tensors.items():
        spec = TensorSpec.of(name, tensor)
        start, shape, local = (0,) * tensor.dim(), tuple(tensor.shape), tensor
        placements = getattr(tensor, "placements", None)
        if placements is not None:
            mesh: Any = tensor.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
            coordinate = mesh.get_coordinate()
            if coordinate is None:
                continue
            start, shape = local_box(spec, tuple(mesh.shape), coordinate, placements)
            local = tensor.to_local()  # pyright: ignore[reportAttributeAccessIssue]
        if tuple(local.shape) != shape:
            raise LayoutError(f"{name!r} has a local shape {tuple(local.shape)}, expected {shape}")
        if local.numel() == 0:
            continue
        item = local.element_size()
        strides = tuple(stride * item for stride in local.stride())
        reach = sum((n - 1) * by for n, by in zip(shape, strides, strict=True)) + item
        gaps = reach - math.prod(shape) * item
        builder.add(name, reach, [Slice(name, start, shape, name, 0, strides)], [spec], gaps)
    return ClusterLayout.build(builder.tensors, [builder.layout()], ties)


def local_box(
    spec: TensorSpec, mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Start and shape of the box that DTensor gives to one coordinate of a mesh.

    Args:
        spec: the whole tensor.
        mesh: extents of the mesh.
        coordinate: the rank's.
        placements: one per mesh dimension: Shard, Replicate, or the strided shard of FSDP2 over
            tensor parallelism, which cuts after the mesh dimensions to its right.

    Raises:
        LayoutError: a placement is partial, or of a kind that is not known here.
    """
    start, shape = [0] * len(spec.shape), list(spec.shape)
    late, early = [], []
    for dimension, placement in enumerate(placements):
        kind = type(placement).__name__
        if kind == "Replicate":
            continue
        if kind not in ("Shard", "_StridedShard"):
            raise LayoutError(
                f"{spec.name!r} has placement {placement} on mesh dimension {dimension}: only "
                "sharded and replicated tensors have slices; redistribute it first"
            )
        (late if kind == "_StridedShard" else early).append((dimension, placement.dim))
    if len({dim for _, dim in late}) != len(late):
        raise LayoutError(f"{spec.name!r} is strided twice along one dimension: not supported")
    for dimension, dim in (*early, *late):
        dim %= len(spec.shape)
        begin, end = chunk(shape[dim], coordinate[dimension], mesh[dimension])
        start[dim] += begin
        shape[dim] = end - begin
    return tuple(start), tuple(shape)
