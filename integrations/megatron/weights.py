"""Which boxes of a checkpoint's tensors the parameters of one Megatron-Core rank are made of.

One table serves the loader and the weight plane. It follows Megatron-Core 0.16: query heads, key
and value of one group lie together; gate lies above up; a rank holds a range of groups, of
intermediate features, of the vocabulary, of layers and of experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from integrations.trainer.model.config import ModelConfig
from integrations.trainer.model.weights import EMBEDDING, FINAL_NORM, LM_HEAD

__all__ = ["Piece", "Place", "parameter_pieces"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank stands; each rank counts from 0 in a group of the given size."""

    tensor_rank: int = 0
    tensor_size: int = 1
    pipeline_rank: int = 0
    pipeline_size: int = 1
    expert_rank: int = 0
    expert_size: int = 1
    expert_tensor_rank: int = 0
    expert_tensor_size: int = 1


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a checkpoint tensor and the first of the parameter's rows that it fills.

    Attributes:
        tensor: name in the checkpoint.
        start, shape: the box, one entry per dimension of the tensor.
        row: of the parameter. A piece is as wide as the parameter.
    """

    tensor: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    row: int = 0


def parameter_pieces(shape: ModelConfig, place: Place) -> dict[str, tuple[Piece, ...]]:
    """For every parameter of a rank's `GPTModel` (local modules), the boxes that fill it.

    Args:
        shape: of the whole model; its dimensions are multiples of the sizes in `place`.
        place: of the rank.
    """
    width, share = shape.hidden_size, shape.vocab_size // place.tensor_size
    rows = ((place.tensor_rank * share, 0), (share, width))
    first, last = place.pipeline_rank == 0, place.pipeline_rank == place.pipeline_size - 1
    found: dict[str, tuple[Piece, ...]] = {}
    if first:
        found["embedding.word_embeddings.weight"] = (Piece(EMBEDDING, *rows),)
    layers = shape.layers // place.pipeline_size
    for index in range(layers):
        layer = place.pipeline_rank * layers + index
        for name, pieces in _layer(shape, place, layer):
            found[f"decoder.layers.{index}.{name}"] = pieces
    if last:
        found["decoder.final_layernorm.weight"] = (Piece(FINAL_NORM, (0,), (width,)),)
        if not shape.tie_word_embeddings:
            found["output_layer.weight"] = (Piece(LM_HEAD, *rows),)
        elif not first:
            found["output_layer.weight"] = (Piece(EMBEDDING, *rows),)
    return found


def _layer(shape: ModelConfig, place: Place, layer: int) -> Iterator[tuple[str, tuple[Piece, ...]]]:
    stem = f"model.layers.{layer}"
    width, head = shape.hidden_size, shape.head_dim
    yield "input_layernorm.weight", (Piece(f"{stem}.input_layernorm.weight", (0,), (width,)),)
    yield "self_attention.linear_qkv.weight", tuple(_qkv(shape, place, f"{stem}.self_attn"))
    if shape.qk_norm:
        for part in ("q", "k"):
            source = f"{stem}.self_attn.{part}_norm.weight"
            yield f"self_attention.{part}_layernorm.weight", (Piece(source, (0,), (head,)),)
    columns = shape.heads * head // place.tensor_size
    output = Piece(
        f"{stem}.self_attn.o_proj.weight", (0, place.tensor_rank * columns), (width, columns)
    )
    yield "self_attention.linear_proj.weight", (output,)
    norm = Piece(f"{stem}.post_attention_layernorm.weight", (0,), (width,))
    yield "pre_mlp_layernorm.weight", (norm,)
    if layer not in shape.moe_layers:
        yield from _swiglu(
            "mlp",
            f"{stem}.mlp",
            (width, shape.intermediate_size),
            place.tensor_rank,
            place.tensor_size,
        )
        return
    gate = Piece(f"{stem}.mlp.gate.weight", (0, 0), (shape.experts, width))
    yield "mlp.router.weight", (gate,)
    local = shape.experts // place.expert_size
    for index in range(local):
        expert = place.expert_rank * local + index
        yield from _swiglu(
            f"mlp.experts.local_experts.{index}",
            f"{stem}.mlp.experts.{expert}",
            (width, shape.moe_intermediate_size),
            place.expert_tensor_rank,
            place.expert_tensor_size,
        )


def _qkv(shape: ModelConfig, place: Place, stem: str) -> Iterator[Piece]:
    head, width = shape.head_dim, shape.hidden_size
    groups, queries = shape.kv_heads // place.tensor_size, shape.heads // shape.kv_heads
    row = 0
    for index in range(groups):
        group = place.tensor_rank * groups + index
        for part, heads in (("q", queries), ("k", 1), ("v", 1)):
            box = (group * heads * head, 0), (heads * head, width)
            yield Piece(f"{stem}.{part}_proj.weight", *box, row)
            row += heads * head


def _swiglu(
    name: str, stem: str, size: tuple[int, int], rank: int, ranks: int
) -> Iterator[tuple[str, tuple[Piece, ...]]]:
    width, features = size[0], size[1] // ranks
    begin = rank * features
    yield (
        f"{name}.linear_fc1.weight",
        tuple(
            Piece(f"{stem}.{part}_proj.weight", (begin, 0), (features, width), row)
            for part, row in (("gate", 0), ("up", features))
        ),
    )
    down = Piece(f"{stem}.down_proj.weight", (0, begin), (width, features))
    yield f"{name}.linear_fc2.weight", (down,)
