"""Layouts of a large mixture of experts on paper: what trainer and rollout ranks hold.

The model has latent attention (a low-rank query and a low-rank, shared key-value projection), one
shared expert, and the shapes of published trillion-parameter models by default. Nothing here
allocates weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy

from weightplane.cluster_layout import ClusterLayout
from weightplane.errors import LayoutError
from weightplane.layout_columns import LayoutColumns

__all__ = [
    "FORMATS",
    "PaperModel",
    "RolloutRanks",
    "TrainerRanks",
    "rollout_layout",
    "trainer_layout",
]

FORMATS = ("bf16", "fp8", "mxfp4")
"""bf16 throughout; matrices in fp8 with a scale per 128 x 128; or experts in MXFP4, rest bf16."""

_FP8_BLOCK = 128
_MXFP4_BLOCK = 32


@dataclass(frozen=True, slots=True)
class PaperModel:
    """Shapes of the model; ``dense_layers`` leading layers have no experts.

    Published models of this size have one dense layer; with 0 every layer has experts.
    """

    layers: int = 61
    dense_layers: int = 0
    experts: int = 384
    hidden: int = 7168
    intermediate: int = 2048
    dense_intermediate: int = 18432
    heads: int = 64
    query_rank: int = 1536
    key_value_rank: int = 512
    rope: int = 64
    head: int = 128
    vocabulary: int = 163840
    format: str = "bf16"

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise LayoutError(f"format is {self.format!r}; use one of {', '.join(FORMATS)}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("format", "dense_layers") and value < 1:
                raise LayoutError(f"{field.name} is {value}; use at least 1")
        if not 0 <= self.dense_layers <= self.layers:
            raise LayoutError(f"dense_layers is {self.dense_layers}; use 0 to {self.layers}")


@dataclass(frozen=True, slots=True)
class TrainerRanks:
    """Pipeline stages of ``expert`` ranks each; attention in ``tensor`` parts, else replicated."""

    pipeline: int = 8
    expert: int = 32
    tensor: int = 1


@dataclass(frozen=True, slots=True)
class RolloutRanks:
    """Replicas of ``expert`` groups of ``tensor`` ranks each.

    Attention is cut into ``tensor`` parts and replicated over the groups; every group has its own
    experts, each of them cut into ``tensor`` parts.
    """

    tensor: int = 8
    expert: int = 16
    replicas: int = 1


@dataclass(frozen=True)
class _Matrix:
    """A matrix that is cut along ``axis`` (None: held whole) inside one attention or MLP block."""

    name: str
    shape: tuple[int, int]
    axis: int | None


def trainer_layout(model: PaperModel, ranks: TrainerRanks | None = None) -> ClusterLayout:
    """What the trainer's ranks hold: fused gate and up, whole experts, stages of whole layers.

    Raises:
        LayoutError: experts, heads or layers do not divide.
    """
    ranks = TrainerRanks() if ranks is None else ranks
    _divides("experts", model.experts, "expert", ranks.expert)
    _divides("expert", ranks.expert, "tensor", ranks.tensor)
    if not 1 <= ranks.pipeline <= model.layers:
        raise LayoutError(f"pipeline is {ranks.pipeline}; use 1 to {model.layers}")
    names = [f"trainer/{rank}" for rank in range(ranks.pipeline * ranks.expert)]
    columns = LayoutColumns(names, 2)
    stages = _stages(model.layers, ranks.pipeline)
    local = numpy.arange(ranks.expert)
    part = local % ranks.tensor
    for layer in range(model.layers):
        here = stages[layer] * ranks.expert + local
        _add_dense(columns, model, layer, here, part, ranks.tensor)
        if layer >= model.dense_layers:
            _add_experts(columns, model, layer, here, local, ranks.expert, part * 0, 1)
    first, last = local, (ranks.pipeline - 1) * ranks.expert + local
    _add_ends(columns, model, first, last, part, ranks.tensor)
    return columns.layout()


def rollout_layout(model: PaperModel, ranks: RolloutRanks | None = None) -> ClusterLayout:
    """What the ranks of all rollout replicas need.

    Raises:
        LayoutError: experts, heads or intermediate sizes do not divide.
    """
    ranks = RolloutRanks() if ranks is None else ranks
    _divides("experts", model.experts, "expert", ranks.expert)
    if ranks.replicas < 1:
        raise LayoutError(f"replicas is {ranks.replicas}; use at least 1")
    per_replica = ranks.tensor * ranks.expert
    names = [
        f"rollout/{replica}/{rank}"
        for replica in range(ranks.replicas)
        for rank in range(per_replica)
    ]
    columns = LayoutColumns(names, 2)
    everybody = numpy.arange(len(names))
    part = everybody % ranks.tensor
    group = everybody % per_replica // ranks.tensor
    for layer in range(model.layers):
        _add_dense(columns, model, layer, everybody, part, ranks.tensor)
        if layer >= model.dense_layers:
            _add_experts(columns, model, layer, everybody, group, ranks.expert, part, ranks.tensor)
    _add_ends(columns, model, everybody, everybody, part, ranks.tensor)
    return columns.layout()


def _stages(layers: int, pipeline: int) -> list[int]:
    """The stage of every layer; the embedding's and the head's stage get no more than others."""
    size, extra = divmod(layers, pipeline)
    longer = [0] * pipeline
    inner_first = [*range(1, pipeline - 1), pipeline - 1, 0] if pipeline > 1 else [0]
    for stage in inner_first[:extra]:
        longer[stage] = 1
    return [stage for stage in range(pipeline) for _ in range(size + longer[stage])]


def _divides(what: str, amount: int, by: str, ways: int) -> None:
    if ways < 1 or amount % ways:
        raise LayoutError(f"{what} is {amount}, which {by} = {ways} does not divide")


def _add_dense(
    columns: LayoutColumns, model: PaperModel, layer: int, ranks: numpy.ndarray,
    part: numpy.ndarray, parts: int,
) -> None:  # fmt: skip
    """Attention, norms, router, and the shared expert or dense MLP of one layer."""
    prefix = f"model.layers.{layer}"
    hidden, heads = model.hidden, model.heads
    _divides("heads", heads, "tensor", parts)
    fp8 = model.format == "fp8"
    latent = [
        _Matrix(f"{prefix}.self_attn.q_a_proj", (model.query_rank, hidden), None),
        _Matrix(
            f"{prefix}.self_attn.kv_a_proj_with_mqa",
            (model.key_value_rank + model.rope, hidden), None,
        ),
    ]  # fmt: skip
    _add_fused(columns, f"{prefix}.self_attn.fused_qkv_a_proj", latent, ranks, part, 1, fp8)
    for name, shape, axis in (
        ("q_b_proj", (heads * (model.head + model.rope), model.query_rank), 0),
        ("kv_b_proj", (heads * 2 * model.head, model.key_value_rank), 0),
        ("o_proj", (hidden, heads * model.head), 1),
    ):
        matrix = _Matrix(f"{prefix}.self_attn.{name}", shape, axis)
        _add_fused(columns, matrix.name, [matrix], ranks, part, parts, fp8)
    moe = layer >= model.dense_layers
    inner = model.intermediate if moe else model.dense_intermediate
    _divides("intermediate", inner, "tensor", parts)
    mlp = f"{prefix}.mlp.shared_experts" if moe else f"{prefix}.mlp"
    gate_up = [
        _Matrix(f"{mlp}.gate_proj", (inner, hidden), 0),
        _Matrix(f"{mlp}.up_proj", (inner, hidden), 0),
    ]
    _add_fused(columns, f"{mlp}.gate_up_proj", gate_up, ranks, part, parts, fp8)
    down = _Matrix(f"{mlp}.down_proj", (hidden, inner), 1)
    _add_fused(columns, down.name, [down], ranks, part, parts, fp8)
    vectors = [
        (f"{prefix}.input_layernorm", (hidden,), "bfloat16"),
        (f"{prefix}.post_attention_layernorm", (hidden,), "bfloat16"),
        (f"{prefix}.self_attn.q_a_layernorm", (model.query_rank,), "bfloat16"),
        (f"{prefix}.self_attn.kv_a_layernorm", (model.key_value_rank,), "bfloat16"),
    ]
    if moe:
        vectors += [
            (f"{prefix}.mlp.gate", (model.experts, hidden), "float32"),
            (f"{prefix}.mlp.gate.e_score_correction_bias", (model.experts,), "float32"),
        ]
    for name, shape, dtype in vectors:
        columns.whole(name, ranks, columns.tensor(f"{name}.weight", shape, dtype))


def _add_ends(
    columns: LayoutColumns, model: PaperModel, first: numpy.ndarray, last: numpy.ndarray,
    part: numpy.ndarray, parts: int,
) -> None:  # fmt: skip
    """Embedding, final norm and head."""
    _divides("vocabulary", model.vocabulary, "tensor", parts)
    shape = (model.vocabulary, model.hidden)
    for name, ranks in (("model.embed_tokens", first), ("lm_head", last)):
        _add_fused(columns, name, [_Matrix(name, shape, 0)], ranks, part, parts, fp8=False)
    norm = columns.tensor("model.norm.weight", (model.hidden,), "bfloat16")
    columns.whole("model.norm", last, norm)


def _add_fused(
    columns: LayoutColumns, storage: str, matrices: list[_Matrix], ranks: numpy.ndarray,
    part: numpy.ndarray, parts: int, fp8: bool,
) -> None:  # fmt: skip
    """Matrices of one width under one another in one storage, each cut into ``parts``."""
    scaled = (lambda extent: -(-extent // _FP8_BLOCK)) if fp8 else None
    kinds: list[tuple[str, str, int, Callable[[int], int] | None]] = [
        (".weight", "float8_e4m3fn" if fp8 else "bfloat16", 1 if fp8 else 2, None)
    ]
    if scaled is not None:
        kinds.append((".weight_scale_inv", "float32", 4, scaled))
    for suffix, dtype, item, resize in kinds:
        numbers, starts, shapes, offsets, end, width = [], [], [], [], 0, 0
        for matrix in matrices:
            shape = matrix.shape if resize is None else tuple(map(resize, matrix.shape))
            numbers.append(columns.tensor(matrix.name + suffix, (shape[0], shape[1]), dtype))
            box = list(shape)
            start = numpy.zeros((len(ranks), 2), numpy.int64)
            if matrix.axis is not None:
                _divides(matrix.name, shape[matrix.axis], "tensor", parts)
                box[matrix.axis] //= parts
                start[:, matrix.axis] = part * box[matrix.axis]
            starts.append(start)
            shapes.append(box)
            offsets.append(end)
            width = box[1]
            end += box[0] * width * item
        columns.storage(
            storage + suffix, ranks, end, [numbers], numpy.stack(starts, axis=1),
            [shapes], [offsets], [width * item, item],
        )  # fmt: skip


def _add_experts(
    columns: LayoutColumns, model: PaperModel, layer: int, ranks: numpy.ndarray,
    group: numpy.ndarray, groups: int, part: numpy.ndarray, parts: int,
) -> None:  # fmt: skip
    """Stacked experts of one layer: w13 [experts, 2 * inner, hidden], w2 [experts, hidden, inner].

    Args:
        group: int [ranks], which share of the experts a rank has.
        part: int [ranks], which part of every expert.
    """
    local = model.experts // groups
    hidden, inner = model.hidden, model.intermediate
    _divides("intermediate", inner, "tensor", parts)
    expert = group[:, None] * local + numpy.arange(local)
    kinds: dict[str, list[tuple[str, str, int, int, int]]] = {
        "bf16": [(".weight", "bfloat16", 2, 1, 1)],
        "fp8": [
            (".weight", "float8_e4m3fn", 1, 1, 1),
            (".weight_scale_inv", "float32", 4, _FP8_BLOCK, _FP8_BLOCK),
        ],
        "mxfp4": [
            (".weight_packed", "float4_e2m1fn", 1, 1, 2),
            (".weight_scale", "float8_e8m0fnu", 1, 1, _MXFP4_BLOCK),
        ],
    }
    base = f"model.layers.{layer}.mlp.experts"
    for suffix, dtype, item, row_block, column_block in kinds[model.format]:
        # Shapes in items: what one scale, or one byte of two elements, stands for is one item.
        share = 2 if dtype == "float4_e2m1fn" else 1
        tensors = {}
        for name, shape in (
            ("gate_proj", (inner, hidden)), ("up_proj", (inner, hidden)),
            ("down_proj", (hidden, inner)),
        ):  # fmt: skip
            items = (-(-shape[0] // row_block), -(-shape[1] // column_block))
            tensors[name] = (
                items,
                numpy.array(
                    [
                        columns.tensor(
                            f"{base}.{number}.{name}{suffix}", (items[0], items[1] * share), dtype
                        )
                        for number in range(model.experts)
                    ]
                ),
            )
        (rows, width), gate = tensors["gate_proj"]
        up = tensors["up_proj"][1]
        _divides(f"{base}{suffix} rows", rows, "tensor", parts)
        high = rows // parts
        matrix = high * width * item
        both = numpy.stack([gate[expert], up[expert]], axis=2).reshape(len(ranks), -1)
        start = numpy.zeros((len(ranks), 1, 2), numpy.int64)
        start[:, 0, 0] = part * high
        columns.storage(
            f"{base}.w13{suffix}", ranks, 2 * local * matrix, both, start, [high, width],
            [numpy.arange(2 * local) * matrix], [width * item, item],
        )  # fmt: skip
        (rows, width), down = tensors["down_proj"]
        _divides(f"{base}{suffix} columns", width, "tensor", parts)
        wide = width // parts
        start = numpy.zeros((len(ranks), 1, 2), numpy.int64)
        start[:, 0, 1] = part * wide
        columns.storage(
            f"{base}.w2{suffix}", ranks, local * rows * wide * item, down[expert], start,
            [rows, wide], [numpy.arange(local) * rows * wide * item], [wide * item, item],
        )  # fmt: skip
