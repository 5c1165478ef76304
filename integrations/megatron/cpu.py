"""What Megatron-Core needs to run on a CPU over gloo: a few names replaced, and put back.

Megatron-Core asks torch for the current CUDA device when it makes a tensor, keeps states of CUDA's
random number generators, and writes ``device="cuda"`` into its pipeline schedules. Inside
`on_cpu()` these mean the CPU. Nothing is computed differently.
"""

# Megatron-Core is installed beside the engine tests only.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from megatron.core.fusions import fused_softmax
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import moe_utils

from integrations.errors import EngineConfigError
from integrations.megatron.version import require_version

__all__ = ["on_cpu"]


@contextmanager
def on_cpu() -> Iterator[None]:
    """Lets Megatron-Core build and run models on the CPU inside the block.

    Blocks may be nested. Dropout draws from torch's own generator, the same on all ranks, so models
    for which that matters must not be built here; the contract refuses dropout anyway.

    Raises:
        EngineConfigError: a version of Megatron-Core that this was not written for, or a machine
            with CUDA, where Megatron-Core's own names are right.
    """
    require_version()
    if torch.cuda.is_available():
        raise EngineConfigError(
            "Megatron-Core runs on CUDA here, and on_cpu() would send half of it to the CPU: hide "
            "the devices (CUDA_VISIBLE_DEVICES=''), or leave on_cpu() out"
        )
    device = torch.device("cpu")
    replacements: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", lambda: device),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.Tensor, "cuda", lambda tensor, *_, **__: tensor),
        (random.CudaRNGStatesTracker, "fork", lambda tracker, name="": nullcontext()),
        (random, "_get_cuda_rng_state", lambda *_, **__: torch.empty(0, dtype=torch.uint8)),
        (random, "_set_cuda_rng_state", lambda *_, **__: None),
        (fused_softmax, "get_default_causal_mask", _causal_mask),
        (schedules, "torch", _TorchWithoutCuda()),
    ]
    with ExitStack() as stack:
        for holder, name, value in replacements:
            stack.enter_context(mock.patch.object(holder, name, value))
        # Megatron-Core defines the name with Transformer Engine only, and reads it without.
        stack.enter_context(mock.patch.object(moe_utils, "te_general_gemm", None, create=True))
        yield


def _causal_mask(tokens: int) -> torch.Tensor:
    """bool ``[tokens, tokens]``, True where a query (row) must not see a key."""
    return torch.ones(tokens, tokens, dtype=torch.bool).triu(diagonal=1)


class _TorchWithoutCuda(ModuleType):
    """torch as the schedules see it: counters that they want on CUDA are made on the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*size: Any, device: Any = None, **options: Any) -> torch.Tensor:
        return torch.zeros(*size, device="cpu" if device == "cuda" else device, **options)
