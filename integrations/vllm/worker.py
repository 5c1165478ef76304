"""What the plugin does in a vLLM worker: load, patch, prove, record."""

# vLLM is installed beside the engine tests only.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.forward_context import get_forward_context

from consistency.contract import NumericsContract
from integrations.errors import RequestError
from integrations.vllm.attachment import Attachment, attach, attached
from integrations.vllm.compatibility import require_supported
from integrations.vllm.options import OPERATIONS, VllmOptions
from integrations.vllm.patching import patch_model, weights_as_loaded
from integrations.vllm.routes import RouteRecorder
from integrations.vllm.sampling import ContractSampler

__all__ = ["load_model", "prove_hooks", "start_recording", "take_trace"]


def load_model(load: Callable[[], Any], runner: Any, options: VllmOptions) -> Any:
    """Loads the model by `load`, and routes it to the contract.

    Raises:
        EngineConfigError: something that cannot be honoured.
    """
    config = runner.vllm_config
    shape = require_supported(config)
    contract = NumericsContract(
        compute_dtype=str(config.model_config.dtype).removeprefix("torch."),
        tp_invariant=options.tp_invariant,
    )
    contract.require_supported()
    with weights_as_loaded(options):
        result = load()

    def record(layer: int, ids: torch.Tensor) -> None:
        if attachment.routes is not None:
            attachment.routes.record(layer, ids)

    records = bool(shape.moe_layers) and options.record_routes
    patched = patch_model(runner.model, shape, options, record if records else None)
    sampling = frozenset(options.operations) & {"logprobs", "sampling"}
    if sampling:
        seed = config.model_config.seed or 0
        runner.sampler = ContractSampler(runner.sampler, runner, sampling, seed)
        patched.operators.extend(runner.sampler.operators)
    whole = set(options.operations) == set(OPERATIONS)
    attachment = Attachment(options, shape, contract if whole else None, patched)
    attach(runner, attachment)
    return result


def prove_hooks(runner: Any) -> None:
    """Runs the model once on one token and checks that no hook was passed by.

    Raises:
        EngineConfigError: a hook that did not fire.
    """
    attachment = attached(runner)
    if attachment is None:
        return
    with torch.inference_mode():
        # Without metadata vLLM's own attention leaves its output unwritten, and a router then meets
        # whatever the memory held; ours does not need it.
        own_attention = "attention" not in attachment.options.operations
        _, hidden = runner._dummy_run(1, force_attention=own_attention)
        runner._dummy_sampler_run(hidden)
    attachment.patched.require_fired()


def start_recording(runner: Any) -> None:
    """Records the routes of every pass from now on; the KV cache must exist."""
    attachment = attached(runner)
    if attachment is None or not (attachment.shape.moe_layers and attachment.options.record_routes):
        return
    block_size = runner.cache_config.block_size
    slots = runner.kv_cache_config.num_blocks * block_size
    routes = attachment.routes = RouteRecorder(attachment.shape, slots, block_size)
    update_states, model_forward = runner._update_states, runner._model_forward

    def keep_then_update(scheduler_output: Any) -> Any:
        # vLLM's own update forgets finished requests; their slots are written later in this step.
        for name in scheduler_output.preempted_req_ids or ():
            if name in runner.requests:
                routes.keep(name, runner.requests[name].block_ids[0])
        for name in scheduler_output.finished_req_ids:
            if name in runner.requests:
                routes.finish(name, runner.requests[name].block_ids[0])
        return update_states(scheduler_output)

    def forward_then_store(*args: Any, **kwargs: Any) -> Any:
        output = model_forward(*args, **kwargs)
        metadata: Any = get_forward_context().attn_metadata
        if metadata is None:
            routes.discard()
            return output
        mapping = next(iter(metadata.values())).slot_mapping
        rows = runner.input_batch.num_reqs
        counts = np.diff(runner.query_start_loc.np[: rows + 1])
        starts = runner.input_batch.num_computed_tokens_cpu[:rows]
        routes.store(runner.input_batch, counts, starts, mapping.numpy())
        return output

    runner._update_states, runner._model_forward = keep_then_update, forward_then_store


def take_trace(runner: Any, request: str) -> bytes:
    """The bytes of a request's `RoutingTrace`; see `RouteRecorder.take`.

    Raises:
        RequestError: this engine records no routes, or has none of that request.
    """
    attachment = attached(runner)
    if attachment is None or attachment.routes is None:
        raise RequestError(
            "this engine records no routes: serve an MoE model with additional_config="
            "{'lockstep': {'record_routes': true}}"
        )
    known = [
        name for name in runner.requests if name == request or name.rpartition("-")[0] == request
    ]
    blocks = runner.requests[known[0]].block_ids[0] if known else None
    return attachment.routes.take(request, blocks).to_bytes()
