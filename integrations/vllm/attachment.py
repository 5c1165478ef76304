"""`Attachment`: what Lockstep holds in a vLLM worker, found on its model runner and its model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from consistency.contract import NumericsContract
from integrations.trainer.model.config import ModelConfig
from integrations.vllm.options import VllmOptions
from integrations.vllm.patching import PatchedModel
from integrations.vllm.routes import RouteRecorder

__all__ = ["Attachment", "attach", "attached"]

_ATTRIBUTE: Final = "_lockstep"


@dataclass(slots=True)
class Attachment:
    """What belongs to one model runner.

    Attributes:
        options: as configured.
        shape: of the model.
        contract: what the engine computes under; None unless every operation is routed.
        patched: the operators.
        routes: the recorder, once the cache exists; None for a dense model or when switched off.
    """

    options: VllmOptions
    shape: ModelConfig
    contract: NumericsContract | None
    patched: PatchedModel
    routes: RouteRecorder | None = None


def attach(runner: Any, attachment: Attachment) -> None:
    """Makes `attached` find it, from the runner and from its model."""
    setattr(runner, _ATTRIBUTE, attachment)
    setattr(runner.model, _ATTRIBUTE, attachment)


def attached(holder: Any) -> Attachment | None:
    """What a runner or model carries; None in an engine that is not configured."""
    return getattr(holder, _ATTRIBUTE, None)
