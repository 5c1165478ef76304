"""Writes a model with packed weights as a checkpoint that an engine loads: safetensors and config.

The bytes are those of the codec: what was packed for training is copied into the layout of the
engine, never quantised again. The quantiser's settings go into the header of every file, so that
``lockstep quant audit`` and the next reader know which rule made the scales.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.quant.formats import BLOCK, BlockFormat
from consistency.quant.layouts import (
    EXPERT_MATRIX,
    CheckpointLayout,
    GateUp,
    matrices_of,
    to_layout,
)
from consistency.quant.mxfp4 import PackedTensor
from consistency.quant.settings import QuantSettings

SETTINGS_KEY = "lockstep.quantiser"
"""Key of the settings, as JSON, in the header of every safetensors file."""

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"

# Loaders of these layouts take them for one kind of model alone.
_MODEL_TYPES = {
    CheckpointLayout.GPT_OSS: "gpt_oss",
    CheckpointLayout.DEEPSEEK_V4: "deepseek_v4",
}
_FUSED_BIAS = ".experts.gate_up_proj_bias"
_NOT_FINITE_MATTERS = (torch.float32, torch.bfloat16, torch.float16)


def export_checkpoint(
    folder: str | os.PathLike[str],
    weights: Mapping[str, torch.Tensor | PackedTensor],
    config: Mapping[str, Any],
    *,
    layout: CheckpointLayout,
    gate_up: GateUp = "stacked",
    max_file_bytes: int = 5 * 1024**3,
) -> None:
    """Writes ``config.json`` and safetensors.

    Args:
        folder: must not exist yet; it appears when it is whole.
        weights: every tensor of the model, by the names of transformers: packed ones as matrices
            (``<module>.weight``) or stacked experts, see `matrices_of`; all others dense. For
            deepseek-v4 dense tensors keep the names they have, which must be that model's own.
        config: the model's configuration, as in its ``config.json``, not quantised.
        layout: of the packed weights.
        gate_up: order of the rows in a stacked gate_up_proj of `weights`.
        max_file_bytes: a file holds at most this much, or one tensor.

    Raises:
        InvalidInputError: the folder exists, the configuration is quantised already or of a model
            that the layout is not for, nothing is packed, packed weights have different settings or
            are MXFP8, the layout has no place for a weight, a scale byte is 255, a dense weight
            holds NaN or infinity, or a name occurs twice.
        UnsupportedError: the layout is no `CheckpointLayout`.
    """
    if not isinstance(layout, CheckpointLayout):
        known = ", ".join(f"CheckpointLayout.{member.name}" for member in CheckpointLayout)
        raise UnsupportedError(f"layout is {layout!r}: use one of {known}")
    target = Path(folder)
    if target.exists():
        raise InvalidInputError(f"{target} exists already: name a new folder, or remove it")
    if config.get("quantization_config"):
        raise InvalidInputError(
            "config has a quantization_config already: give the configuration of the model that "
            "was trained, without it"
        )
    needed = _MODEL_TYPES.get(layout)
    if needed is not None and config.get("model_type") != needed:
        raise InvalidInputError(
            f"config has model_type {config.get('model_type')!r}, but engines read the layout "
            f"{layout.value} for {needed!r} alone: use compressed-tensors"
        )
    packed, dense = _sorted_out(weights, gate_up)
    settings = _common_settings(packed)
    tensors = _unique(_tensors(layout, packed, dense, gate_up))
    written = {**config, **quantisation_of(layout, packed, dense)}
    _write(target, tensors, written, settings, max_file_bytes)


def quantisation_of(
    layout: CheckpointLayout,
    packed: Mapping[str, PackedTensor],
    dense: Mapping[str, torch.Tensor],
) -> dict[str, Any]:
    """The entries of ``config.json`` that tell an engine how the weights are stored.

    Args:
        layout: of the checkpoint.
        packed: matrices by name.
        dense: all other tensors; the matrices among them are named as not quantised.
    """
    plain = sorted(
        name.removesuffix(".weight")
        for name, tensor in dense.items()
        if name.endswith(".weight") and tensor.dim() == 2 and tensor.dtype in _NOT_FINITE_MATTERS
    )
    if layout is CheckpointLayout.GPT_OSS:
        return {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": plain}}
    if layout is CheckpointLayout.DEEPSEEK_V4:
        # Its linears may be FP8 in blocks of 128; those that are not are named.
        return {
            "expert_dtype": "fp4",
            "quantization_config": {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "scale_fmt": "ue8m0",
                "weight_block_size": [128, 128],
                "modules_to_not_convert": plain,
            },
        }
    if "lm_head.weight" not in packed and "lm_head" not in plain:
        # A tied head has no tensor of its own, but loaders build the module and ask for its scheme.
        plain.append("lm_head")
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": BLOCK,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.uint8",
        "zp_dtype": "torch.uint8",
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": "mxfp4-pack-quantized",
    }
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": plain,
        }
    }


def _sorted_out(
    weights: Mapping[str, torch.Tensor | PackedTensor], gate_up: GateUp
) -> tuple[dict[str, PackedTensor], dict[str, torch.Tensor]]:
    packed: dict[str, PackedTensor] = {}
    dense: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if isinstance(weight, PackedTensor):
            _require_mxfp4(name, weight)
            for matrix_name, matrix in matrices_of(name, weight, gate_up):
                if matrix_name in packed:
                    raise InvalidInputError(f"{matrix_name} is given twice: stacked and by itself")
                packed[matrix_name] = matrix
            continue
        if not isinstance(weight, torch.Tensor):
            raise InvalidInputError(f"{name} is a {type(weight).__name__}: give tensors")
        if weight.dtype in _NOT_FINITE_MATTERS and not bool(torch.isfinite(weight).all()):
            raise InvalidInputError(
                f"{name} holds NaN or infinity: a diverged model is not exported"
            )
        dense[name] = weight.detach()
    if not packed:
        raise InvalidInputError(
            "no weight is packed: pack those that the engine serves in MXFP4 (consistency.quant."
            "pack, FakeQuant.packed), or save an ordinary checkpoint"
        )
    return packed, dense


def _require_mxfp4(name: str, weight: PackedTensor) -> None:
    if weight.settings.format is not BlockFormat.MXFP4:
        raise InvalidInputError(f"{name} is {weight.settings.format.value}: only mxfp4 is exported")
    if bool((weight.scales == 255).any()):
        raise InvalidInputError(
            f"{name} has a scale byte 255, which is NaN: it was not written by this codec; pack "
            "the weight that it was made from"
        )


def _common_settings(packed: Mapping[str, PackedTensor]) -> QuantSettings:
    first_name, first = next(iter(packed.items()))
    for name, weight in packed.items():
        if weight.settings != first.settings:
            raise InvalidInputError(
                f"{first_name} and {name} were packed with different settings "
                f"({first.settings.scale_rule.value}, {weight.settings.scale_rule.value} or "
                "another field): a checkpoint names one quantiser; pack all weights with it"
            )
    return first.settings


def _tensors(
    layout: CheckpointLayout,
    packed: Mapping[str, PackedTensor],
    dense: Mapping[str, torch.Tensor],
    gate_up: GateUp,
) -> Iterator[tuple[str, torch.Tensor]]:
    yield from to_layout(layout, packed)
    for name, tensor in dense.items():
        if name.endswith(_FUSED_BIAS):
            if layout is not CheckpointLayout.GPT_OSS:
                raise InvalidInputError(f"{name}: {layout.value} has no biases of experts")
            halves = tensor.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
            yield name, tensor if gate_up == "interleaved" else halves.contiguous()
            continue
        for matrix_name, matrix in matrices_of(name, tensor, gate_up):
            if EXPERT_MATRIX.fullmatch(matrix_name) and layout is not (
                CheckpointLayout.COMPRESSED_TENSORS
            ):
                raise InvalidInputError(
                    f"{matrix_name} is dense, but {layout.value} packs every expert: quantise it, "
                    f"or use {CheckpointLayout.COMPRESSED_TENSORS.value}"
                )
            if layout is CheckpointLayout.DEEPSEEK_V4 and name.startswith("model."):
                raise InvalidInputError(
                    f"{name}: deepseek-v4 names its tensors itself (layers.0.attn.wq_a.weight); "
                    "give dense tensors under those names"
                )
            yield matrix_name, matrix.contiguous()


def _unique(tensors: Iterator[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if name in found:
            raise InvalidInputError(f"the checkpoint would hold {name} twice: rename or drop one")
        found[name] = tensor
    return found


def _write(
    target: Path,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    settings: QuantSettings,
    limit: int,
) -> None:
    from safetensors.torch import save_file

    partial = target.parent / f".{target.name}.partial"
    partial.mkdir(parents=True)
    try:
        files = _files(tensors, limit)
        header = {"format": "pt", SETTINGS_KEY: json.dumps(settings.to_mapping(), sort_keys=True)}
        for file, names in files.items():
            # Copies, because safetensors refuses tensors that share memory, as slices of one do.
            held = {name: tensors[name].clone().cpu() for name in names}
            save_file(held, partial / file, metadata=header)
        if len(files) > 1:
            total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
            index = {
                "metadata": {"total_size": total},
                "weight_map": {name: file for file, names in files.items() for name in names},
            }
            _write_json(partial / INDEX_FILE, index)
        _write_json(partial / CONFIG_FILE, config)
        for path in partial.iterdir():
            _flush(path)
        partial.rename(target)
    except BaseException:
        for path in partial.iterdir():
            path.unlink()
        partial.rmdir()
        raise


def _files(tensors: Mapping[str, torch.Tensor], limit: int) -> dict[str, list[str]]:
    """Names by file, in order; a file holds at most `limit` bytes, or one tensor."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        byte_count = tensor.numel() * tensor.element_size()
        if groups[-1] and size + byte_count > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += byte_count
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    count = len(groups)
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": names
        for number, names in enumerate(groups, start=1)
    }


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
