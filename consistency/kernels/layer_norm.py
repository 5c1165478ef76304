"""layer_norm: (x - mean) / deviation * weight + bias, forward and backward."""

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
    "lockstep_layer_norm_forward",
    *(POINTER, INT32, POINTER, INT32, POINTER, INT32, POINTER, POINTER),
    *(INT64, INT64, FLOAT, INT32),
)
_backward_kernel = Kernel(
    "lockstep_layer_norm_backward",
    *(POINTER, POINTER, INT32, POINTER, INT32, POINTER),
    *(POINTER, POINTER, POINTER, INT64, INT64, INT32),
)


@one_device
def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """y[..., i] = (x[..., i] - mean) / sqrt(variance + eps) * weight[i] + bias[i].

    The mean and the variance are those of the row: variance = mean over j of (x[..., j] - mean)^2.

    Args:
        x: [..., W], float32, bfloat16 or float16, any strides.
        weight: [W], one of the same dtypes, or None for 1. With an attribute `main_grad` (float32,
            [W]) its gradient is added there and autograd receives None; so too for `bias`.
        bias: [W], one of the same dtypes, or None for 0.
        eps: added to the variance; 0 or more.

    Returns:
        [..., W] in the dtype of `x`.

    Raises:
        UnsupportedError: a dtype, layout or device that the kernels do not take.
        InvalidInputError: shapes that do not fit, or a negative eps.

    Order of reduction:
        A row is cut into segments of 256 that fold into 16 lanes by index modulo 16; lanes and
        segments are joined by binary trees that depend on W alone. Mean and variance take a pass
        each, in fp32; one rounding at the end. dweight and dbias add the rows in order inside
        blocks of 8, and join the blocks by a binary tree of neighbours.
    """
    require_float("x", x)
    if x.dim() == 0:
        raise InvalidInputError("x must have at least one dimension, got a scalar")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            require_float(name, parameter, 1)
            require_shape(name, parameter, x.shape[-1:], "the last dimension of x")
    if not 0.0 <= eps < float("inf"):
        raise InvalidInputError(f"eps must be finite and 0 or more, got {eps}")
    if torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (x, weight, bias)
    ):
        return _LayerNorm.apply(x, weight, bias, eps)
    return _forward(x.contiguous(), _contiguous(weight), _contiguous(bias), eps, None)


def _contiguous(parameter: torch.Tensor | None) -> torch.Tensor | None:
    return None if parameter is None else parameter.contiguous()


def _pointer_and_dtype(parameter: torch.Tensor | None) -> tuple[int | None, int]:
    if parameter is None:
        return None, 0
    return parameter.data_ptr(), DTYPE_CODES[parameter.dtype]


def _forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    moments: torch.Tensor | None,
) -> torch.Tensor:
    """y; fills `moments` [rows, 2], the mean and 1 / deviation, if there is one."""
    if on_triton(x):
        out, found = triton_kernels("layer_norm").forward(x, weight, bias, eps)
        if moments is not None:
            moments.copy_(found)
        return out
    out = torch.empty_like(x)
    _forward_kernel(
        x.data_ptr(),
        DTYPE_CODES[x.dtype],
        *_pointer_and_dtype(weight),
        *_pointer_and_dtype(bias),
        out.data_ptr(),
        None if moments is None else moments.data_ptr(),
        x.shape[:-1].numel(),
        x.shape[-1],
        eps,
        thread_count(),
    )
    return out


def _backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    moments: torch.Tensor,
    wanted: tuple[bool, bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The gradients of x (in its dtype), weight and bias (float32), None where not wanted."""
    if on_triton(x):
        return triton_kernels("layer_norm").backward(grad, x, weight, moments, wanted)
    grad_x = torch.empty_like(x) if wanted[0] else None
    grad_weight, grad_bias = (
        x.new_empty(x.shape[-1:], dtype=torch.float32) if want else None for want in wanted[1:]
    )
    _backward_kernel(
        grad.data_ptr(),
        x.data_ptr(),
        DTYPE_CODES[x.dtype],
        *_pointer_and_dtype(weight),
        moments.data_ptr(),
        *(None if t is None else t.data_ptr() for t in (grad_x, grad_weight, grad_bias)),
        x.shape[:-1].numel(),
        x.shape[-1],
        thread_count(),
    )
    return grad_x, grad_weight, grad_bias


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        # Saved tensors may come back as other objects; main_grad is an attribute of these.
        ctx.weight, ctx.bias = weight, bias
        x, weight = x.contiguous(), _contiguous(weight)
        moments = x.new_empty((x.shape[:-1].numel(), 2), dtype=torch.float32)
        ctx.save_for_backward(x, weight, moments)
        return _forward(x, weight, _contiguous(bias), eps, moments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, moments = ctx.saved_tensors
        grad_x, grad_weight, grad_bias = _backward(
            grad.contiguous(), x, weight, moments, ctx.needs_input_grad[:3]
        )
        return (
            grad_x,
            _accumulate_or_return(ctx.weight, grad_weight),
            _accumulate_or_return(ctx.bias, grad_bias),
            None,
        )


def _accumulate_or_return(
    parameter: torch.Tensor | None, grad: torch.Tensor | None
) -> torch.Tensor | None:
    if parameter is None or grad is None:
        return None
    buffer = main_gradient(parameter)
    if buffer is not None:
        buffer.add_(grad)
        return None
    return grad.to(parameter.dtype)
