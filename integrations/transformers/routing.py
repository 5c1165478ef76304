"""Record and replay the routers of a transformers model, patched or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from consistency import kernels
from consistency.errors import UnsupportedError
from consistency.routing_replay import RoutingRecorder, RoutingReplayer

__all__ = ["record_routes", "replay_routes"]


@contextmanager
def record_routes(model: Any, recorder: RoutingRecorder) -> Iterator[None]:
    """Tells `recorder` the expert ids of every MoE layer in the passes inside the block.

    Args:
        model: a Qwen3-MoE causal language model.
        recorder: for the model's MoE layers; take its rows after each pass.

    Raises:
        UnsupportedError: a model without routers.
    """

    def hook(layer: int) -> Any:
        return lambda module, inputs, output: recorder.record(layer, output[2])

    with _hooks(model, hook):
        yield


@contextmanager
def replay_routes(model: Any, replayer: RoutingReplayer) -> Iterator[None]:
    """Sends the tokens of one pass to the traced experts, and checks that every layer was replayed.

    Scores are gathered from the full softmax of the router's own logits, in fp32, so gradients
    reach the router whether the model is patched or not.

    Args:
        model: a Qwen3-MoE causal language model.
        replayer: for the tokens of the pass, in the order of the batch's rows.

    Raises:
        UnsupportedError: a model without routers.
        RoutingReplayError: a trace of other tokens or layers.
    """

    def hook(layer: int) -> Any:
        def replay(module: Any, inputs: Any, output: tuple[torch.Tensor, ...]) -> Any:
            logits, _, live = output
            ids = replayer.ids_for(layer, live)
            scores, ids = kernels.route(
                logits.float(),
                module.top_k,
                normalise=bool(module.norm_topk_prob),
                replay_ids=ids,
            )
            return logits, scores, ids

        return replay

    with _hooks(model, hook):
        yield
    replayer.finish()


@contextmanager
def _hooks(model: Any, hook: Any) -> Iterator[None]:
    routers = {
        layer: block.mlp.gate
        for layer, block in enumerate(model.model.layers)
        if hasattr(block.mlp, "gate")
    }
    if not routers:
        raise UnsupportedError(f"model is a {type(model).__name__} without routers")
    handles = [router.register_forward_hook(hook(layer)) for layer, router in routers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
