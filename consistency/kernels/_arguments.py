"""Checks of tensors that enter a kernel: each failure is one line that says what to change."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.kernels._dispatch import values_readable

if TYPE_CHECKING:
    from collections.abc import Sequence

# Mirrors DType in cpu/simd.hpp.
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_DTYPE_NAMES = "float32, bfloat16 or float16"


def require_float(name: str, tensor: torch.Tensor, dimensions: int | None = None) -> int:
    """Checks that `tensor` is a tensor of a supported floating dtype; returns its dtype code.

    Args:
        name: the argument's name in messages.
        tensor: any object.
        dimensions: the exact number of dimensions, or None for any.

    Raises:
        InvalidInputError: not a tensor, or a wrong number of dimensions.
        UnsupportedError: another dtype.
    """
    if not isinstance(tensor, torch.Tensor):
        raise InvalidInputError(f"{name} must be a tensor, got {type(tensor).__name__}")
    code = DTYPE_CODES.get(tensor.dtype)
    if code is None:
        raise UnsupportedError(
            f"{name} has dtype {tensor.dtype}; the kernels take {_DTYPE_NAMES}: convert it"
        )
    if dimensions is not None and tensor.dim() != dimensions:
        raise InvalidInputError(
            f"{name} must have {dimensions} dimension{'s' if dimensions != 1 else ''}, "
            f"got shape {tuple(tensor.shape)}"
        )
    return code


def require_integer(
    name: str,
    tensor: torch.Tensor,
    dimensions: int | None = None,
    dtypes: Sequence[torch.dtype] = (torch.int64,),
) -> None:
    """Checks that `tensor` is a tensor of one of the integer `dtypes`."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidInputError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise UnsupportedError(f"{name} must be {wanted}, got {tensor.dtype}: convert it")
    if dimensions is not None and tensor.dim() != dimensions:
        raise InvalidInputError(
            f"{name} must have {dimensions} dimension{'s' if dimensions != 1 else ''}, "
            f"got shape {tuple(tensor.shape)}"
        )


def require_indices(name: str, tensor: torch.Tensor, limit: int, meaning: str) -> None:
    """Raises unless every element of an integer tensor lies in [0, limit)."""
    if tensor.numel() == 0 or not values_readable(tensor):
        return
    if tensor.numel() <= 64:  # a decode step; cheaper than two reductions
        values = tensor.reshape(-1).tolist()
        lowest, highest = min(values), max(values)
    else:
        lowest, highest = (int(bound) for bound in tensor.aminmax())
    if lowest < 0 or highest >= limit:
        raise InvalidInputError(
            f"{name} must lie in [0, {limit}) ({meaning}), got values from {lowest} to {highest}"
        )


def require_shape(name: str, tensor: torch.Tensor, shape: Sequence[int], meaning: str) -> None:
    """Raises unless the tensor has exactly `shape`; `meaning` says where that shape comes from."""
    if tuple(tensor.shape) != tuple(shape):
        raise InvalidInputError(
            f"{name} must have shape {tuple(shape)} ({meaning}), got {tuple(tensor.shape)}"
        )


def output_dtype_code(dtype: torch.dtype) -> int:
    """The dtype code of a requested output dtype."""
    code = DTYPE_CODES.get(dtype)
    if code is None:
        raise UnsupportedError(f"out_dtype {dtype} is not supported: choose {_DTYPE_NAMES}")
    return code


def require_positive(name: str, value: float) -> float:
    """Checks that a scalar is a finite number above zero; returns it as a float."""
    number = float(value)
    if not (math.isfinite(number) and number > 0.0):
        raise InvalidInputError(f"{name} must be finite and greater than 0, got {value}")
    return number


def main_gradient(weight: torch.Tensor) -> torch.Tensor | None:
    """The fp32 buffer `weight.main_grad` into which a backward accumulates, or None.

    Raises:
        InvalidInputError: the attribute is not an fp32 tensor of the weight's shape and device.
    """
    buffer = getattr(weight, "main_grad", None)
    if buffer is None:
        return None
    if (
        not isinstance(buffer, torch.Tensor)
        or buffer.dtype != torch.float32
        or buffer.device != weight.device
    ):
        kind = f"{buffer.dtype} on {buffer.device}" if isinstance(buffer, torch.Tensor) else buffer
        wanted = "CPU" if weight.is_cpu else str(weight.device)
        raise InvalidInputError(f"weight.main_grad must be a float32 {wanted} tensor, got {kind}")
    require_shape("weight.main_grad", buffer, weight.shape, "the weight's")
    return buffer
