"""Finds the first operation, and its layer, whose output differs between the two sides.

Both sides run the same sequence and keep the output of every layer. Points are compared in the
order of computation; the first that differs names the operation, because its inputs were equal.
Between the projections and the attention lie norm and rotation of queries and keys; rotated
queries and keys are compared with what the contract makes of the (equal) projections, so that
either can be named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from consistency import kernels
from integrations.trainer.model.config import ModelConfig

__all__ = ["Difference", "first_difference", "points"]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two sides part.

    Attributes:
        operation: as in the `OPERATIONS` of the integrations.
        layer: index of the decoder layer; the number of layers for what follows the last one.
        point: which output.
        tokens: how many tokens differ there, of `total`.
        largest: absolute difference.
    """

    operation: str
    layer: int
    point: str
    tokens: int
    total: int
    largest: float

    def __str__(self) -> str:
        return (
            f"{self.operation} in layer {self.layer} ({self.point}): {self.tokens} of "
            f"{self.total} tokens differ, by at most {self.largest:.3g}"
        )


def points(config: ModelConfig) -> Iterator[tuple[str, int, str]]:
    """(operation, layer, point) in the order of computation."""
    for layer in range(config.layers):
        yield "rms_norm", layer, "input_norm"
        yield "linear", layer, "qkv"
        yield "rotary", layer, "rotary"
        yield "attention", layer, "attention"
        yield "linear", layer, "o_proj"
        yield "rms_norm", layer, "mlp_norm"
        if layer in config.moe_layers:
            yield "router", layer, "router_ids"
            yield "router", layer, "router_scores"
            yield "experts", layer, "experts"
        else:
            yield "linear", layer, "gate_up"
            yield "silu_and_mul", layer, "activation"
            yield "linear", layer, "down"
    yield "rms_norm", config.layers, "final_norm"
    yield "lm_head", config.layers, "logits"


def first_difference(
    config: ModelConfig,
    rollout: Mapping[str, torch.Tensor],
    train: Mapping[str, torch.Tensor],
    norms: Mapping[str, torch.Tensor],
) -> Difference | None:
    """The first point whose outputs differ; None when all are equal.

    Args:
        config: shape of the model.
        rollout: outputs by ``LAYER.POINT``, rows in the order of positions; logits of the last rows
            only.
        train: the same of the trainer.
        norms: weights of the query and key norms, ``LAYER.q_norm`` and ``LAYER.k_norm``.
    """
    table = kernels.rotary_table(config.head_dim, config.max_positions, config.rope_theta)
    for operation, layer, point in points(config):
        name = f"{layer}.{point}"
        if point == "rotary":
            difference = _rotary_difference(config, layer, rollout, norms, table)
        else:
            difference = _difference(operation, layer, point, rollout.get(name), train.get(name))
        if difference is not None:
            return difference
    return None


def _difference(operation: str, layer: int, point: str, left: Any, right: Any) -> Difference | None:
    if left is None or right is None:
        return None
    rows = min(len(left), len(right))
    left, right = left[-rows:].double(), right[-rows:].double()
    if point == "router_ids":
        left, right = left.sort(-1).values, right.sort(-1).values
    if point == "router_scores":
        left, right = left.sort(-1).values, right.sort(-1).values
    gap = (left - right).abs().flatten(1).amax(1)
    count = int((gap > 0).sum())
    return Difference(operation, layer, point, count, rows, float(gap.max())) if count else None


def _rotary_difference(
    config: ModelConfig,
    layer: int,
    rollout: Mapping[str, torch.Tensor],
    norms: Mapping[str, torch.Tensor],
    table: torch.Tensor,
) -> Difference | None:
    qkv = rollout[f"{layer}.qkv"]
    heads = (config.heads, config.kv_heads, config.kv_heads)
    query, key, _ = qkv.view(len(qkv), -1, config.head_dim).split(heads, dim=1)
    positions = torch.arange(len(qkv))
    for part, value in (("q", query), ("k", key)):
        if config.qk_norm:
            value = kernels.rms_norm(value, norms[f"{layer}.{part}_norm"], config.rms_norm_eps)
        want = kernels.rotary(value, positions, table).flatten(1)
        found = _difference(
            "rotary", layer, f"rotated {part}", rollout[f"{layer}.rotary_{part}"], want
        )
        if found is not None:
            return found
    return None
