"""rms_norm: x / rms(x) * weight, forward and backward."""

from __future__ import annotations

from typing import Any

import torch

from consistency.errors import InvalidInputError
from consistency.kernels._arguments import (
    DTYPE_CODES,
    main_gradient,
    require_float,
    require_shape,
)
from consistency.kernels._autograd import once_differentiable
from consistency.kernels._dispatch import on_triton, one_device, triton_kernels
from consistency.kernels.library import FLOAT, INT32, INT64, POINTER, Kernel, thread_count

_forward_kernel = Kernel(
    "lockstep_rms_norm_forward",
    *(POINTER, INT32, POINTER, INT32, INT32, POINTER, POINTER),
    *(INT64, INT64, FLOAT, INT32),
)
_backward_kernel = Kernel(
    "lockstep_rms_norm_backward",
    *(POINTER, POINTER, INT32, POINTER, INT32, INT32),
    *(POINTER, POINTER, POINTER, INT64, INT64, INT32),
)


@one_device
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, zero_centered: bool = False
) -> torch.Tensor:
    """y[..., i] = x[..., i] / sqrt(mean of x[..., j]^2 over j + eps) * weight[i].

    `add_rms_norm` adds a residual first.

    Args:
        x: [..., W], float32, bfloat16 or float16, any strides.
        weight: [W], one of the same dtypes. With an attribute `main_grad` (float32, [W]) its
            gradient is added there and autograd receives None.
        eps: added to the mean of the squares; 0 or more.
        zero_centered: the weight holds the difference from 1: multiply by 1 + weight.

    Returns:
        [..., W] in the dtype of `x`.

    Raises:
        UnsupportedError: a dtype, layout or device that the kernels do not take.
        InvalidInputError: shapes that do not fit, or a negative eps.

    Order of reduction:
        The squares of a row fold into 16 lanes by index modulo 16, the lanes by a fixed tree; all
        in fp32, one rounding at the end. The sum in the backward folds alike. dweight adds the rows
        in order inside blocks of 8, and joins the blocks by a binary tree of neighbours.
    """
    require_float("x", x)
    require_float("weight", weight, 1)
    if x.dim() == 0 or x.shape[-1] != weight.shape[0]:
        raise InvalidInputError(
            f"the last dimension of x must be {weight.shape[0]} (weight is {tuple(weight.shape)}), "
            f"got x {tuple(x.shape)}"
        )
    if not 0.0 <= eps < float("inf"):
        raise InvalidInputError(f"eps must be finite and 0 or more, got {eps}")
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _RmsNorm.apply(x, weight, eps, zero_centered)
    return _forward(x.contiguous(), weight.contiguous(), eps, zero_centered, None)


@one_device
def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    zero_centered: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(s), s) with s = x + residual, rounded to the dtype of the residual stream.

    Args:
        x: [..., W], float32, bfloat16 or float16.
        residual: the shape and dtype of `x`.
        weight, eps, zero_centered: as in `rms_norm`.

    Returns:
        (normed, s), both [..., W] in the dtype of `x`.

    Raises:
        UnsupportedError: a dtype, layout or device that the kernels do not take.
        InvalidInputError: shapes or dtypes that do not fit, or a negative eps.

    Order of reduction:
        That of `rms_norm`, which reads the rounded s (the contract's `residual`).
    """
    require_float("x", x)
    require_float("residual", residual)
    require_shape("residual", residual, x.shape, "that of x")
    if residual.dtype != x.dtype:
        raise InvalidInputError(
            f"residual must have the dtype of x, {x.dtype}, got {residual.dtype}"
        )
    total = x + residual
    return rms_norm(total, weight, eps, zero_centered=zero_centered), total


def _forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    zero_centered: bool,
    inverse_rms: torch.Tensor | None,
) -> torch.Tensor:
    if on_triton(x):
        out, inverse = triton_kernels("rms_norm").forward(x, weight, eps, zero_centered)
        if inverse_rms is not None:
            inverse_rms.copy_(inverse)
        return out
    out = torch.empty_like(x)
    width = weight.shape[0]
    _forward_kernel(
        x.data_ptr(),
        DTYPE_CODES[x.dtype],
        weight.data_ptr(),
        DTYPE_CODES[weight.dtype],
        zero_centered,
        out.data_ptr(),
        None if inverse_rms is None else inverse_rms.data_ptr(),
        x.shape[:-1].numel(),
        width,
        eps,
        thread_count(),
    )
    return out


def _backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    zero_centered: bool,
    inverse_rms: torch.Tensor,
    needs: tuple[bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(dx, dweight in fp32), None where `needs` says so."""
    if on_triton(x):
        kernels = triton_kernels("rms_norm")
        return kernels.backward(grad, x, weight, zero_centered, inverse_rms, needs)
    grad_x = torch.empty_like(x) if needs[0] else None
    grad_weight = None
    if needs[1]:
        grad_weight = torch.empty(weight.shape, dtype=torch.float32)
    _backward_kernel(
        grad.data_ptr(),
        x.data_ptr(),
        DTYPE_CODES[x.dtype],
        weight.data_ptr(),
        DTYPE_CODES[weight.dtype],
        zero_centered,
        inverse_rms.data_ptr(),
        None if grad_x is None else grad_x.data_ptr(),
        None if grad_weight is None else grad_weight.data_ptr(),
        inverse_rms.numel(),
        weight.shape[0],
        thread_count(),
    )
    return grad_x, grad_weight


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool
    ) -> torch.Tensor:
        # Saved tensors may come back as other objects; main_grad is an attribute of this one.
        ctx.weight, ctx.zero_centered = weight, zero_centered
        x, weight = x.contiguous(), weight.contiguous()
        inverse_rms = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, inverse_rms)
        return _forward(x, weight, eps, zero_centered, inverse_rms)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, inverse_rms = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x, grad_weight = _backward(
            grad, x, weight, ctx.zero_centered, inverse_rms, ctx.needs_input_grad[:2]
        )
        if grad_weight is None:
            return grad_x, None, None, None
        buffer = main_gradient(ctx.weight)
        if buffer is not None:
            buffer.add_(grad_weight)
            return grad_x, None, None, None
        return grad_x, grad_weight.to(weight.dtype), None, None
