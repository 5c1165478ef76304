"""How checkpoints of engines name and order packed weights: pure functions, no files.

The common ground of all layouts is the matrix: ``<module>.weight``, [out, in], one per projection
and per expert, named as transformers names it (``model.layers.0.mlp.experts.3.gate_proj.weight``).
A layout stores the codes and scales of a matrix under other names, in other dtypes, or stacked:

=================== =============================== ============================================
layout              per matrix or per layer         tensors
=================== =============================== ============================================
compressed-tensors  a matrix                        ``.weight_packed`` uint8 [out, in / 2],
                                                    ``.weight_scale`` uint8 [out, in / 32]
gpt-oss             the experts of a layer, gate    ``.gate_up_proj_blocks`` uint8
                    and up rows interleaved         [experts, 2 I, H / 32, 16], ``_scales`` uint8
                                                    [experts, 2 I, H / 32]; ``down_proj`` likewise
deepseek-v4         a matrix of an expert; w1, w3,  ``.weight`` int8 [out, in / 2], ``.scale``
                    w2 are gate, up, down           float8_e8m0fnu [out, in / 32]
=================== =============================== ============================================
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Literal, TypeVar, get_args

import torch

from consistency.errors import InvalidInputError
from consistency.quant.formats import BLOCK
from consistency.quant.mxfp4 import PackedTensor

GateUp = Literal["stacked", "interleaved"]
"""Order of the rows of a fused gate_up_proj: all of gate before all of up, or in turns."""

EXPERT_MATRIX = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
"""Name of an expert's matrix: prefix, expert, projection."""

_STACKED_EXPERTS = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")
_DEEPSEEK_LAYER = re.compile(r"model\.(layers\.\d+)\.mlp\.experts")
_DEEPSEEK_OF = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_DEEPSEEK_NAME = re.compile(r"(layers\.\d+)\.ffn\.experts\.(\d+)\.(w[123])\.weight")
_PROJECTION_OF = {short: long for long, short in _DEEPSEEK_OF.items()}

Weight = TypeVar("Weight", torch.Tensor, PackedTensor)


class CheckpointLayout(Enum):
    """Where a checkpoint keeps codes and scales; the value is how commands name it."""

    COMPRESSED_TENSORS = "compressed-tensors"
    GPT_OSS = "gpt-oss"
    DEEPSEEK_V4 = "deepseek-v4"


def matrices_of(name: str, weight: Weight, gate_up: GateUp) -> Iterator[tuple[str, Weight]]:
    """The matrices that a weight of a model holds, as views.

    Args:
        name: of the weight: ``<module>.weight``, or ``....experts.gate_up_proj`` and ``down_proj``
            of stacked experts, [experts, out, in].
        weight: dense or packed.
        gate_up: order of the rows of a stacked gate_up_proj.

    Yields:
        Name and matrix; the weight itself if it is a matrix.

    Raises:
        InvalidInputError: stacked experts under another name, odd rows in a gate_up_proj, or an
            unknown order.
    """
    if gate_up not in get_args(GateUp):
        known = " or ".join(map(repr, get_args(GateUp)))
        raise InvalidInputError(f"gate_up is {gate_up!r}: use {known}")
    if len(weight.shape) != 3:
        yield name, weight
        return
    match = _STACKED_EXPERTS.fullmatch(name)
    if match is None:
        raise InvalidInputError(
            f"{name} has shape {tuple(weight.shape)}: three dimensions are known for "
            "....experts.gate_up_proj and ....experts.down_proj alone, [experts, out, in]"
        )
    prefix, projection = match.groups()
    for expert in range(weight.shape[0]):
        stem, matrix = f"{prefix}.{expert}", _at(weight, expert)
        if projection == "down_proj":
            yield f"{stem}.down_proj.weight", matrix
            continue
        gate, up = split_gate_up(name, matrix, gate_up)
        yield f"{stem}.gate_proj.weight", gate
        yield f"{stem}.up_proj.weight", up


def is_quantisable(
    name: str, shape: tuple[int, ...], targets: Literal["experts", "linears"]
) -> bool:
    """Whether a matrix is one of the targets: an expert's, or a linear's but for the embedding, the
    LM head and routers, which stay dense in every published recipe."""
    if EXPERT_MATRIX.fullmatch(name):
        return True
    dense = ("embed_tokens.weight", "lm_head.weight", ".mlp.gate.weight", ".router.weight")
    return (
        targets == "linears"
        and len(shape) == 2
        and name.endswith(".weight")
        and not name.endswith(dense)
    )


def split_gate_up(name: str, matrix: Weight, gate_up: GateUp) -> tuple[Weight, Weight]:
    """The gate and the up rows of a fused projection [2 I, H], as views.

    Raises:
        InvalidInputError: the number of rows is odd.
    """
    rows = matrix.shape[0]
    if rows % 2:
        raise InvalidInputError(f"{name} has {rows} rows: gate and up have equally many")
    if gate_up == "interleaved":
        return _at(matrix, slice(0, None, 2)), _at(matrix, slice(1, None, 2))
    return _at(matrix, slice(0, rows // 2)), _at(matrix, slice(rows // 2, None))


def to_layout(
    layout: CheckpointLayout, matrices: Mapping[str, PackedTensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint that stand for packed matrices.

    Args:
        layout: which.
        matrices: MXFP4 matrices by name. For gpt-oss, all those of a layer's experts.

    Yields:
        Name and tensor, contiguous.

    Raises:
        InvalidInputError: a matrix that the layout has no place for, or experts with gaps or of
            different shapes.
    """
    if layout is CheckpointLayout.GPT_OSS:
        yield from _gpt_oss(matrices)
        return
    for name, packed in matrices.items():
        if layout is CheckpointLayout.COMPRESSED_TENSORS:
            stem = _stem(name)
            yield f"{stem}.weight_packed", packed.codes.contiguous()
            yield f"{stem}.weight_scale", packed.scales.contiguous()
        else:
            stem = deepseek_stem(name)
            yield f"{stem}.weight", packed.codes.contiguous().view(torch.int8)
            yield f"{stem}.scale", packed.scales.contiguous().view(torch.float8_e8m0fnu)


def deepseek_stem(name: str) -> str:
    """``layers.N.ffn.experts.E.wI`` for the name of an expert's matrix.

    Raises:
        InvalidInputError: it is no expert's: deepseek-v4 keeps everything else in FP8 or bf16.
    """
    match = EXPERT_MATRIX.fullmatch(name)
    layer = _DEEPSEEK_LAYER.fullmatch(match[1]) if match else None
    if match is None or layer is None:
        raise InvalidInputError(
            f"{name} is packed, but deepseek-v4 packs experts alone "
            "(model.layers.N.mlp.experts.E.gate_proj.weight); exclude it"
        )
    return f"{layer[1]}.ffn.experts.{match[2]}.{_DEEPSEEK_OF[match[3]]}"


def matrix_of_deepseek(name: str) -> str | None:
    """The matrix of an expert's ``....weight`` in deepseek-v4; None if it is no expert's."""
    match = _DEEPSEEK_NAME.fullmatch(name)
    if match is None:
        return None
    return f"model.{match[1]}.mlp.experts.{match[2]}.{_PROJECTION_OF[match[3]]}.weight"


def _gpt_oss(matrices: Mapping[str, PackedTensor]) -> Iterator[tuple[str, torch.Tensor]]:
    layers: dict[str, dict[str, dict[int, PackedTensor]]] = {}
    for name, packed in matrices.items():
        match = EXPERT_MATRIX.fullmatch(name)
        if match is None:
            raise InvalidInputError(
                f"{name} is packed, but gpt-oss packs experts alone "
                "(....experts.E.gate_proj.weight or stacked); exclude it"
            )
        of_projection = layers.setdefault(match[1], {}).setdefault(match[3], {})
        of_projection[int(match[2])] = packed
    for prefix, found in layers.items():
        gate, up, down = (
            _stacked(prefix, projection, found.get(projection, {}))
            for projection in ("gate_proj", "up_proj", "down_proj")
        )
        if not gate[0].shape == up[0].shape or len(gate[0]) != len(down[0]):
            raise InvalidInputError(
                f"{prefix}: gate, up and down have {len(gate[0])}, {len(up[0])} and {len(down[0])} "
                "experts or gate and up differ in shape: the layer is not whole"
            )
        # [experts, I, 2, ...] flattened: a gate row, its up row, the next gate row.
        codes, scales = (torch.stack(pair, 2).flatten(1, 2) for pair in zip(gate, up, strict=True))
        for projection, pair in (("gate_up_proj", (codes, scales)), ("down_proj", down)):
            blocks = pair[0].unflatten(-1, (-1, BLOCK // 2)).contiguous()
            yield f"{prefix}.{projection}_blocks", blocks
            yield f"{prefix}.{projection}_scales", pair[1].contiguous()


def _stacked(
    prefix: str, projection: str, by_expert: Mapping[int, PackedTensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [experts, out, in / 2] and scales [experts, out, in / 32] of one projection."""
    if not by_expert or sorted(by_expert) != list(range(len(by_expert))):
        raise InvalidInputError(
            f"{prefix}: {projection} is packed for the experts {sorted(by_expert)}: gpt-oss stacks "
            "all experts of a layer, so quantise all three projections of each, or none"
        )
    ordered = [by_expert[expert] for expert in range(len(by_expert))]
    if len({packed.shape for packed in ordered}) != 1:
        raise InvalidInputError(f"{prefix}: the experts' {projection} have different shapes")
    return (
        torch.stack([packed.codes for packed in ordered]),
        torch.stack([packed.scales for packed in ordered]),
    )


def _stem(name: str) -> str:
    if not name.endswith(".weight"):
        raise InvalidInputError(f"{name} is packed: the name of a matrix ends in .weight")
    return name.removesuffix(".weight")


def _at(weight: Weight, index: int | slice) -> Weight:
    if isinstance(weight, PackedTensor):
        return PackedTensor(weight.codes[index], weight.scales[index], weight.settings)
    return weight[index]
