"""What every layer of a `GPTModel` puts out, by the names that both sides of a comparison use."""

# Megatron-Core is installed beside the engine tests only.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from integrations.megatron.experts import Router

__all__ = ["head_norms", "recorded_activations"]

_Keep = Callable[[str, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class _WatchedRouter(Router):
    """A patched router that tells what it chose."""

    keep: _Keep
    layer: int

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores, ids = Router.route(self, x)
        self.keep(f"{self.layer}.router_ids", ids)
        self.keep(f"{self.layer}.router_scores", scores)
        return scores, ids


@contextmanager
def recorded_activations(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Collects the outputs of one pass over one sequence, ``[tokens, width]`` each.

    Names are ``LAYER.POINT``, see `bench.divergence.locate`. The rotation has no module of its own,
    so its outputs are not among them.

    Args:
        model: a `GPTModel` on one rank, patched or not.
    """
    found: dict[str, torch.Tensor] = {}
    handles: list[Any] = []
    watched: list[tuple[Any, Router]] = []

    def keep(name: str, value: torch.Tensor) -> None:
        found[name] = value.detach().clone().reshape(-1, value.shape[-1])

    def output(module: Any, name: str) -> None:
        def hook(_: Any, inputs: Any, result: Any) -> None:
            keep(name, result[0] if isinstance(result, tuple) else result)

        handles.append(module.register_forward_hook(hook))

    def given(module: Any, name: str) -> None:
        handles.append(module.register_forward_pre_hook(lambda _, inputs: keep(name, inputs[0])))

    def projected(attention: Any, name: str) -> None:
        def hook(_: Any, inputs: Any, result: Any) -> None:
            keep(name, _ungrouped(attention, result[0]))

        handles.append(attention.linear_qkv.register_forward_hook(hook))

    def routed(router: Any, layer: int) -> None:
        if isinstance(router.forward, Router):
            watched.append((router, router.forward))
            router.forward = _WatchedRouter(router, router.forward.tp_invariant, keep, layer)
            return

        def hook(_: Any, inputs: Any, result: Any) -> None:
            chosen = result[0].masked_fill(~result[1], -1.0).topk(router.topk, dim=1)
            keep(f"{layer}.router_ids", chosen.indices)
            keep(f"{layer}.router_scores", chosen.values.float())

        handles.append(router.register_forward_hook(hook))

    for block in model.decoder.layers:
        layer, attention, mlp = block.layer_number - 1, block.self_attention, block.mlp
        output(block.input_layernorm, f"{layer}.input_norm")
        projected(attention, f"{layer}.qkv")
        given(attention.linear_proj, f"{layer}.attention")
        output(attention.linear_proj, f"{layer}.o_proj")
        output(block.pre_mlp_layernorm, f"{layer}.mlp_norm")
        if hasattr(mlp, "router"):
            routed(mlp.router, layer)
            output(mlp, f"{layer}.experts")
        else:
            output(mlp.linear_fc1, f"{layer}.gate_up")
            given(mlp.linear_fc2, f"{layer}.activation")
            output(mlp.linear_fc2, f"{layer}.down")
    last = model.config.num_layers
    output(model.decoder.final_layernorm, f"{last}.final_norm")
    output(model.output_layer, f"{last}.logits")
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
        for router, forward in watched:
            router.forward = forward


def head_norms(model: Any) -> dict[str, torch.Tensor]:
    """Weights of the norms over queries and keys, ``LAYER.q_norm`` and ``LAYER.k_norm``."""
    found: dict[str, torch.Tensor] = {}
    for block in model.decoder.layers:
        for part in ("q", "k"):
            weight = getattr(getattr(block.self_attention, f"{part}_layernorm"), "weight", None)
            if weight is not None:
                found[f"{block.layer_number - 1}.{part}_norm"] = weight.detach()
    return found


def _ungrouped(attention: Any, mixed: torch.Tensor) -> torch.Tensor:
    """Queries, then keys, then values, from groups of queries with their key and value."""
    head = attention.hidden_size_per_attention_head
    groups = attention.num_query_groups_per_partition
    queries = attention.num_attention_heads_per_partition // groups
    grouped = mixed.view(*mixed.shape[:-1], groups, (queries + 2) * head)
    parts = grouped.split([queries * head, head, head], dim=-1)
    return torch.cat([part.flatten(-2) for part in parts], dim=-1)
