"""The plugin that vLLM loads in each of its processes; without configuration it changes nothing.

`register` wraps a few methods of vLLM. Each wrapper asks whether the engine at hand is configured
for Lockstep and, if not, calls the original and nothing else. What is replaced in a configured
engine is replaced on the objects of that engine.
"""

# vLLM is installed beside the engine tests only.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger

from integrations.vllm.compatibility import SUPPORTED_VERSION, require_supported, require_version
from integrations.vllm.options import KEY, VllmOptions

__all__ = ["BACKEND", "TRACE_METHOD", "register"]

BACKEND: Final = "lockstep"
"""Name in vLLM's weight-transfer factory."""

TRACE_METHOD: Final = "lockstep_routing_trace"
"""Worker method for `collective_rpc`: a request id to the bytes of its `RoutingTrace`."""

_logger = init_logger("vllm.lockstep")
_WRAPPED = "_lockstep_wraps"


def register() -> None:
    """Entry point of the group `vllm.general_plugins`; vLLM may call it more than once."""
    _wrap(EngineArgs, "create_engine_config", _create_engine_config)
    if not vllm.__version__.startswith(f"{SUPPORTED_VERSION}."):
        return  # the internals below may be others; a configured engine is refused above
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.cpu_worker import CPUWorker

    _wrap(CPUModelRunner, "load_model", _load_model)
    _wrap(CPUWorker, "compile_or_warm_up_model", _compile_or_warm_up_model)
    _wrap(EngineCore, "collective_rpc", _collective_rpc)
    if not hasattr(CPUWorker, TRACE_METHOD):
        setattr(CPUWorker, TRACE_METHOD, _routing_trace)
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "integrations.vllm.weight_transfer", "PlaneWeightTransferEngine"
        )


def _wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    """Replaces `owner.name` by `around(original, self, ...)`, once."""
    original = getattr(owner, name)
    if hasattr(original, _WRAPPED):
        return

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    setattr(wrapper, _WRAPPED, original)
    setattr(owner, name, wrapper)


def _create_engine_config(original: Any, args: Any, *rest: Any, **kwargs: Any) -> Any:
    """In the process of whoever starts the engine: the place for errors that people read."""
    options = VllmOptions.of(args.additional_config)
    if options is None and not _mentions_key(args.additional_config):
        options = VllmOptions.of_file(Path.cwd())
    if options is None:
        return original(args, *rest, **kwargs)
    require_version()
    # The workers see no file of this process, and one spelling of the options.
    args.additional_config = {**(args.additional_config or {}), KEY: options.to_mapping()}
    if not args.enforce_eager:
        _logger.info("lockstep: enforce_eager is on, because compiled graphs go round the hooks")
        args.enforce_eager = True
    config = original(args, *rest, **kwargs)
    require_supported(config)
    return config


def _mentions_key(additional_config: Any) -> bool:
    return isinstance(additional_config, dict) and KEY in additional_config


def _load_model(original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    options = VllmOptions.of(runner.vllm_config.additional_config)
    if options is None:
        return original(runner, *args, **kwargs)
    from integrations.vllm.worker import load_model

    return load_model(lambda: original(runner, *args, **kwargs), runner, options)


def _compile_or_warm_up_model(original: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(worker, *args, **kwargs)
    if VllmOptions.of(worker.vllm_config.additional_config) is None:
        return result
    from integrations.vllm.worker import prove_hooks, start_recording

    prove_hooks(worker.model_runner)
    start_recording(worker.model_runner)
    _logger.info("lockstep: every hook fired; this engine computes the contract")
    return result


def _routing_trace(worker: Any, request: str) -> bytes:
    from integrations.vllm.worker import take_trace

    return take_trace(worker.model_runner, request)


def _collective_rpc(
    original: Any,
    core: Any,
    method: Any,
    timeout: float | None = None,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """In the engine core, which runs such calls between two steps.

    A commit of the weight plane and what it makes stale go together: no step sees the one without
    the other.
    """
    result = original(core, method, timeout, args, kwargs)
    transfer = core.vllm_config.weight_transfer_config
    if method == "update_weights" and transfer is not None and transfer.backend == BACKEND:
        update = (kwargs or {}).get("update_info") or args[0]
        core.scheduler.reset_prefix_cache(reset_running_requests=True)
        core.set_weight_version(str(update["version"]))
    return result
