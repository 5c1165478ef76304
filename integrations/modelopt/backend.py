"""The backend's entry point, and its registration."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from consistency.quant import fake_quantise
from integrations.modelopt.config import BACKEND, settings_of_quantizer

_MODULE = "modelopt.torch.quantization.nn.modules.tensor_quantizer"


def fake_quantise_with(inputs: torch.Tensor, quantizer: Any) -> torch.Tensor:
    """What Model Optimizer calls for every quantizer with this backend.

    Args:
        inputs: float32 or bfloat16, [..., K], K a multiple of 32.
        quantizer: a ``TensorQuantizer``.

    Returns:
        The QDQ of `inputs` in its dtype, with a straight-through gradient.

    Raises:
        InvalidInputError, UnsupportedError: as `fake_quantise`; the quantizer is no MX quantizer.
    """
    settings = settings_of_quantizer(
        quantizer.num_bits, quantizer.block_sizes, quantizer.backend_extra_args
    )
    return fake_quantise(inputs, settings, name="the quantizer's input")


def register() -> None:
    """Registers the backend with the installed Model Optimizer; again is harmless."""
    tensor_quantizer = importlib.import_module(_MODULE)
    if not tensor_quantizer.is_registered_quant_backend(BACKEND):
        tensor_quantizer.register_quant_backend(BACKEND, fake_quantise_with)


def unregister() -> None:
    """Removes the backend."""
    tensor_quantizer = importlib.import_module(_MODULE)
    tensor_quantizer.unregister_quant_backend(BACKEND)
