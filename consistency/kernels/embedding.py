"""embedding: rows of a table by id, with a deterministic gradient."""

from __future__ import annotations

from typing import Any

import torch

from consistency.errors import InvalidInputError
from consistency.kernels._arguments import (
    DTYPE_CODES,
    main_gradient,
    require_float,
    require_indices,
    require_integer,
)
from consistency.kernels._autograd import once_differentiable
from consistency.kernels._dispatch import on_triton, one_device, triton_kernels
from consistency.kernels.library import INT32, INT64, POINTER, Kernel, thread_count

_gradient = Kernel(
    "lockstep_embedding_gradient",
    *(POINTER, POINTER, INT64, INT64),
    *(POINTER, INT64, INT32),
    *(POINTER, INT64, INT32),
    *(INT32, INT32),
)


@one_device
def embedding(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """y[..., :] = weight[ids[...], :].

    Args:
        ids: [...], int64 or int32, each in [0, V).
        weight: [V, H], float32, bfloat16 or float16. With an attribute `main_grad` (float32,
            [V, H], rows contiguous) its gradient is added there and autograd receives None.

    Returns:
        [..., H] in the dtype of `weight`.

    Raises:
        UnsupportedError: a dtype, layout or device that the kernels do not take.
        InvalidInputError: an id outside the table.

    Order of reduction:
        The gradient of a row of `weight` adds the gradients of its occurrences in order of
        position, in fp32, and is rounded once (or added once to `main_grad`).
    """
    require_integer("ids", ids, None, (torch.int64, torch.int32))
    require_float("weight", weight, 2)
    require_indices("ids", ids, weight.shape[0], "the rows of weight")
    if torch.is_grad_enabled() and weight.requires_grad:
        return _Embedding.apply(ids, weight)
    return _forward(ids, weight)


def _forward(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight.index_select(0, ids.reshape(-1)).view(*ids.shape, weight.shape[1])


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight
        return _forward(ids, weight.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        weight = ctx.weight
        width = weight.shape[1]
        buffer = main_gradient(weight)
        out = (
            torch.zeros_like(weight, memory_format=torch.contiguous_format)
            if buffer is None
            else buffer
        )
        if width > 1 and out.stride(1) != 1:
            raise InvalidInputError(
                f"weight.main_grad must have contiguous rows, got strides {out.stride()}"
            )
        ordered, positions = torch.sort(ids.reshape(-1).long(), stable=True)
        rows = grad.reshape(positions.numel(), width).contiguous()
        if on_triton(rows):
            triton_kernels("embedding").add_occurrences(
                ordered, positions, rows, out, accumulate=buffer is not None
            )
            return None, None if buffer is not None else out
        _gradient(
            ordered.data_ptr(),
            positions.data_ptr(),
            positions.numel(),
            width,
            rows.data_ptr(),
            width,
            DTYPE_CODES[rows.dtype],
            out.data_ptr(),
            out.stride(0),
            DTYPE_CODES[out.dtype],
            int(buffer is not None),
            thread_count(),
        )
        return None, None if buffer is not None else out
