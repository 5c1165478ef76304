"""What Lockstep holds in a vLLM worker: the patched model, its contract and its recorder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from consistency.contract import NumericsContract
from integrations.trainer.model.config import ModelConfig
from integrations.vllm.compatibility import require_supported
from integrations.vllm.options import OPERATIONS, VllmOptions
from integrations.vllm.patching import PatchedModel, patch_model, weights_as_loaded
from integrations.vllm.sampling import ContractSampler

__all__ = ["Attachment", "attached", "load_model", "prove_hooks"]

_ATTRIBUTE = "_lockstep"


@dataclass(slots=True)
class Attachment:
    """What belongs to one model runner.

    Attributes:
        options: as configured.
        shape: of the model.
        contract: what the engine computes under; None unless every operation is routed.
        patched: the operators.
    """

    options: VllmOptions
    shape: ModelConfig
    contract: NumericsContract | None
    patched: PatchedModel


def attached(runner: Any) -> Attachment | None:
    """What a model runner carries; None in an engine that is not configured."""
    return getattr(runner, _ATTRIBUTE, None)


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
    patched = patch_model(runner.model, shape, options, None)
    sampling = frozenset(options.operations) & {"logprobs", "sampling"}
    if sampling:
        seed = config.model_config.seed or 0
        runner.sampler = ContractSampler(runner.sampler, runner, sampling, seed)
        patched.operators.extend(runner.sampler.operators)
    whole = set(options.operations) == set(OPERATIONS)
    setattr(runner, _ATTRIBUTE, Attachment(options, shape, contract if whole else None, patched))
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
        _, hidden = runner._dummy_run(1)
        runner._dummy_sampler_run(hidden)
    attachment.patched.require_fired()
