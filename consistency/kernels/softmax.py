"""softmax and log_softmax over the last dimension, forward and backward."""

from __future__ import annotations

from typing import Any

import torch

from consistency.errors import InvalidInputError
from consistency.kernels._arguments import DTYPE_CODES, require_float
from consistency.kernels._autograd import once_differentiable
from consistency.kernels._dispatch import on_triton, one_device, triton_kernels
from consistency.kernels.library import INT32, INT64, POINTER, Kernel, thread_count

_forward_kernel = Kernel(
    "lockstep_softmax_forward", POINTER, INT32, POINTER, INT64, INT64, INT32, INT32
)
_backward_kernel = Kernel(
    "lockstep_softmax_backward", POINTER, POINTER, POINTER, INT32, INT64, INT64, INT32, INT32
)


@one_device
def softmax(x: torch.Tensor) -> torch.Tensor:
    """y[..., i] = exp(x[..., i] - max(x)) / sum over j of exp(x[..., j] - max(x)).

    Args:
        x: [..., W], float32, bfloat16 or float16, any strides. A row that holds a NaN or +inf, or
            nothing but -inf, becomes NaN; other rows do not notice.

    Returns:
        float32 [..., W].

    Raises:
        UnsupportedError: a dtype, layout or device that the kernels do not take.
        InvalidInputError: a scalar.

    Order of reduction:
        The exponentials of a row fold into 16 lanes by index modulo 16, the lanes by a fixed tree:
        a function of W alone. `log_softmax` uses the same maximum and the same sum.
    """
    return _apply(x, logarithm=False)


@one_device
def log_softmax(x: torch.Tensor) -> torch.Tensor:
    """y[..., i] = x[..., i] - max(x) - log(sum over j of exp(x[..., j] - max(x))).

    Arguments, result, exceptions and order of reduction are those of `softmax`. It is not
    log(softmax(x)), which loses every digit of small probabilities.
    """
    return _apply(x, logarithm=True)


def _apply(x: torch.Tensor, logarithm: bool) -> torch.Tensor:
    require_float("x", x)
    if x.dim() == 0:
        raise InvalidInputError("x must have at least one dimension, got a scalar")
    if torch.is_grad_enabled() and x.requires_grad:
        return _Softmax.apply(x, logarithm)
    return _forward(x, logarithm)


def _forward(x: torch.Tensor, logarithm: bool) -> torch.Tensor:
    x = x.contiguous()
    if on_triton(x):
        return triton_kernels("softmax").forward(x, logarithm)
    out = torch.empty(x.shape, dtype=torch.float32)
    _forward_kernel(
        x.data_ptr(),
        DTYPE_CODES[x.dtype],
        out.data_ptr(),
        x.shape[:-1].numel(),
        x.shape[-1],
        logarithm,
        thread_count(),
    )
    return out


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, logarithm: bool) -> torch.Tensor:
        out = _forward(x, logarithm)
        ctx.save_for_backward(out)
        ctx.dtype, ctx.logarithm = x.dtype, logarithm
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (out,) = ctx.saved_tensors
        grad = grad.contiguous()
        if on_triton(grad):
            kernels = triton_kernels("softmax")
            return kernels.backward(grad, out, ctx.dtype, ctx.logarithm), None
        grad_x = torch.empty(out.shape, dtype=ctx.dtype)
        _backward_kernel(
            grad.data_ptr(),
            out.data_ptr(),
            grad_x.data_ptr(),
            DTYPE_CODES[ctx.dtype],
            out.shape[:-1].numel(),
            out.shape[-1],
            ctx.logarithm,
            thread_count(),
        )
        return grad_x, None
