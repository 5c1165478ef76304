"""What every layer of a vLLM model puts out, by the names that both sides of a comparison use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["recorded_activations"]


@contextmanager
def recorded_activations(runner: Any) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Collects outputs of every pass inside the block; one request at a time keeps rows in order.

    Names are ``LAYER.POINT``, see `bench.divergence.locate`.

    Args:
        runner: vLLM's model runner.
    """
    found: dict[str, list[torch.Tensor]] = {}
    handles: list[Any] = []

    def keep(name: str, value: torch.Tensor) -> None:
        found.setdefault(name, []).append(value.detach().clone())

    def output(module: Any, name: str) -> None:
        def hook(_: Any, inputs: Any, result: Any) -> None:
            keep(name, result[0] if isinstance(result, tuple) else result)

        handles.append(module.register_forward_hook(hook))

    def rotated(module: Any, layer: int) -> None:
        def hook(_: Any, inputs: Any, result: Any) -> None:
            for part, value in zip(("q", "k"), result, strict=True):
                keep(f"{layer}.rotary_{part}", value.flatten(1))

        handles.append(module.register_forward_hook(hook))

    model = runner.model
    restored: list[tuple[Any, Any]] = []
    for layer, block in enumerate(model.model.layers):
        attention, mlp = block.self_attn, block.mlp
        output(block.input_layernorm, f"{layer}.input_norm")
        output(attention.qkv_proj, f"{layer}.qkv")
        rotated(attention.rotary_emb, layer)
        output(attention.attn, f"{layer}.attention")
        output(attention.o_proj, f"{layer}.o_proj")
        output(block.post_attention_layernorm, f"{layer}.mlp_norm")
        if hasattr(mlp, "experts"):
            restored.append(_watch_router(mlp.experts, layer, keep))
            output(mlp, f"{layer}.experts")
        else:
            output(mlp.gate_up_proj, f"{layer}.gate_up")
            output(mlp.act_fn, f"{layer}.activation")
            output(mlp.down_proj, f"{layer}.down")
    last = len(model.model.layers)
    output(model.model.norm, f"{last}.final_norm")
    output(model.logits_processor, f"{last}.logits")
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
        for operator, route in restored:
            operator._route = route


def _watch_router(runner: Any, layer: int, keep: Any) -> tuple[Any, Any]:
    operator = runner.forward
    route = operator._route

    def watched(hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores, ids = route(hidden_states)
        keep(f"{layer}.router_ids", ids.to(torch.int64))
        keep(f"{layer}.router_scores", scores.float())
        return scores, ids

    operator._route = watched
    return operator, route
