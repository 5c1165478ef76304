"""Rotary position embedding: the table, and its application to queries and keys."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.kernels._arguments import (
    DTYPE_CODES,
    require_float,
    require_indices,
    require_integer,
    require_positive,
    require_shape,
)
from consistency.kernels._autograd import once_differentiable
from consistency.kernels._dispatch import on_triton, one_device, triton_kernels
from consistency.kernels.library import INT32, INT64, POINTER, Kernel, thread_count

_rotary_kernel = Kernel(
    "lockstep_rotary",
    *(POINTER, INT32, INT64, INT64, POINTER, POINTER, INT64, POINTER),
    *(INT64, INT64, INT64, INT32, INT32, POINTER),
)


def rotary_table(head_dim: int, max_positions: int, theta: float) -> torch.Tensor:
    """cos and sin of position * theta^(-2 i / head_dim) for every position and i < head_dim / 2.

    Args:
        head_dim: an even number.
        max_positions: the number of rows.
        theta: the base of the frequencies.

    Returns:
        float32 [max_positions, head_dim]: the cosines in the first half of a row, the sines in the
        second. Computed in float64 and rounded once.

    Raises:
        InvalidInputError: an odd head_dim, a negative size, or a theta that is not positive.
    """
    if head_dim < 0 or head_dim % 2:
        raise InvalidInputError(f"head_dim must be even and 0 or more, got {head_dim}")
    if max_positions < 0:
        raise InvalidInputError(f"max_positions must be 0 or more, got {max_positions}")
    theta = require_positive("theta", theta)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / max(head_dim, 1)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float64), theta**-exponents)
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(torch.float32)


@one_device
def rotary(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs (x[t, h, i], x[t, h, D / 2 + i]) by the angle of (positions[t], i).

    y[i] = x[i] cos - x[D / 2 + i] sin;  y[D / 2 + i] = x[D / 2 + i] cos + x[i] sin.

    Args:
        x: [T, heads, D], float32, bfloat16 or float16, any strides.
        positions: int64 or int32 [T].
        table: float32 [P, D] from `rotary_table`.

    Returns:
        [T, heads, D] in the dtype of `x`, contiguous.

    Raises:
        UnsupportedError: a dtype, layout or device that the kernels do not take.
        InvalidInputError: shapes that do not fit, or a position outside [0, P).

    Order of reduction:
        None: two products, each rounded in fp32, and their sum; one rounding at the end.
    """
    require_float("x", x, 3)
    require_integer("positions", positions, 1, (torch.int64, torch.int32))
    require_float("table", table, 2)
    if table.dtype != torch.float32:
        raise UnsupportedError(f"table must be float32 (see rotary_table), got {table.dtype}")
    require_shape("positions", positions, x.shape[:1], "one per token of x")
    if x.shape[2] % 2 or table.shape[1] != x.shape[2]:
        raise InvalidInputError(
            f"x and table must have one even last dimension, got x {tuple(x.shape)} and table "
            f"{tuple(table.shape)}"
        )
    positions = positions.to(torch.int64).contiguous()
    table = table.contiguous()
    if torch.is_grad_enabled() and x.requires_grad:
        return _Rotary.apply(x, positions, table)
    return _rotate(x, positions, table, inverse=False)


def _rotate(
    x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, *, inverse: bool
) -> torch.Tensor:
    if x.stride(2) != 1:
        x = x.contiguous()
    if on_triton(x):
        require_indices("positions", positions, table.shape[0], "build a longer rotary_table")
        return triton_kernels("rotary").rotate(x, positions, table, inverse=inverse)
    out = torch.empty(x.shape, dtype=x.dtype)
    fault = ctypes.c_int64(-1)
    _rotary_kernel(
        x.data_ptr(),
        DTYPE_CODES[x.dtype],
        x.stride(0),
        x.stride(1),
        positions.data_ptr(),
        table.data_ptr(),
        table.shape[0],
        out.data_ptr(),
        *x.shape,
        inverse,
        thread_count(),
        ctypes.addressof(fault),
    )
    if fault.value >= 0:
        raise InvalidInputError(
            f"positions[{fault.value}] is {int(positions[fault.value])}, outside the table's "
            f"{table.shape[0]} positions: build a longer rotary_table"
        )
    return out


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(positions, table)
        return _rotate(x, positions, table, inverse=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _rotate(grad, *ctx.saved_tensors, inverse=True), None, None
