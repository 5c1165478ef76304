"""What every layer of a transformers model puts out, by the names that both sides use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["recorded_activations"]


@contextmanager
def recorded_activations(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Collects the outputs of one pass over one sequence, ``[tokens, width]`` each.

    Names are ``LAYER.POINT``, see `bench.divergence.locate`. The rotation has no module of its own
    in transformers, so its outputs are not among them.

    Args:
        model: a Llama, Qwen3 or Qwen3-MoE causal language model, patched or not.
    """
    found: dict[str, torch.Tensor] = {}
    parts: dict[str, list[torch.Tensor]] = {}
    handles: list[Any] = []

    def rows(value: torch.Tensor) -> torch.Tensor:
        return value.detach().clone().reshape(-1, value.shape[-1])

    def output(module: Any, name: str) -> None:
        handles.append(
            module.register_forward_hook(
                lambda _, inputs, result: found.update({name: rows(result)})
            )
        )

    def given(module: Any, name: str) -> None:
        handles.append(
            module.register_forward_pre_hook(
                lambda _, inputs: found.update({name: rows(inputs[0])})
            )
        )

    def joined(modules: list[Any], name: str) -> None:
        """Outputs side by side, as vLLM's fused projections have them."""

        def hook(_: Any, inputs: Any, result: torch.Tensor) -> None:
            held = parts.setdefault(name, [])
            held.append(rows(result))
            if len(held) == len(modules):
                found[name] = torch.cat(held, dim=1)

        handles.extend(module.register_forward_hook(hook) for module in modules)

    def routed(module: Any, layer: int) -> None:
        def hook(_: Any, inputs: Any, result: Any) -> None:
            found[f"{layer}.router_ids"] = result[2].detach().clone()
            found[f"{layer}.router_scores"] = result[1].detach().float()

        handles.append(module.register_forward_hook(hook))

    for layer, block in enumerate(model.model.layers):
        attention, mlp = block.self_attn, block.mlp
        output(block.input_layernorm, f"{layer}.input_norm")
        joined([attention.q_proj, attention.k_proj, attention.v_proj], f"{layer}.qkv")
        given(attention.o_proj, f"{layer}.attention")
        output(attention.o_proj, f"{layer}.o_proj")
        output(block.post_attention_layernorm, f"{layer}.mlp_norm")
        if hasattr(mlp, "experts"):
            routed(mlp.gate, layer)
            output(mlp, f"{layer}.experts")
        else:
            joined([mlp.gate_proj, mlp.up_proj], f"{layer}.gate_up")
            given(mlp.down_proj, f"{layer}.activation")
            output(mlp.down_proj, f"{layer}.down")
    last = len(model.model.layers)
    output(model.model.norm, f"{last}.final_norm")
    output(model.lm_head, f"{last}.logits")
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
