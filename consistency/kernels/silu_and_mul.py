"""silu_and_mul: the gate of a SwiGLU feed-forward layer, forward and backward."""

from __future__ import annotations

from typing import Any

import torch

from consistency.errors import InvalidInputError
from consistency.kernels._arguments import DTYPE_CODES, require_float
from consistency.kernels._autograd import once_differentiable
from consistency.kernels._dispatch import on_triton, one_device, triton_kernels
from consistency.kernels.library import INT32, INT64, POINTER, Kernel, thread_count

_forward_kernel = Kernel(
    "lockstep_silu_and_mul_forward", POINTER, INT32, POINTER, INT64, INT64, INT32
)
_backward_kernel = Kernel(
    "lockstep_silu_and_mul_backward", POINTER, POINTER, INT32, POINTER, INT64, INT64, INT32
)


@one_device
def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """y[..., i] = silu(gate_up[..., i]) * gate_up[..., I + i], silu(x) = x / (1 + exp(-x)).

    Args:
        gate_up: [..., 2 I], float32, bfloat16 or float16: the gate, then the up projection.

    Returns:
        [..., I] in the dtype of `gate_up`.

    Raises:
        UnsupportedError: a dtype, layout or device that the kernels do not take.
        InvalidInputError: the last dimension is odd or missing.

    Order of reduction:
        None: each element depends on two elements. fp32 inside, one rounding at the end.
    """
    require_float("gate_up", gate_up)
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        raise InvalidInputError(
            f"the last dimension of gate_up must be even, got shape {tuple(gate_up.shape)}"
        )
    if torch.is_grad_enabled() and gate_up.requires_grad:
        return _SiluAndMul.apply(gate_up)
    return _forward(gate_up.contiguous())


def _forward(gate_up: torch.Tensor) -> torch.Tensor:
    if on_triton(gate_up):
        return triton_kernels("silu_and_mul").forward(gate_up)
    half = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], half), dtype=gate_up.dtype)
    _forward_kernel(
        gate_up.data_ptr(),
        DTYPE_CODES[gate_up.dtype],
        out.data_ptr(),
        gate_up.shape[:-1].numel(),
        half,
        thread_count(),
    )
    return out


class _SiluAndMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        return _forward(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (gate_up,) = ctx.saved_tensors
        grad = grad.contiguous()
        if on_triton(grad):
            return triton_kernels("silu_and_mul").backward(grad, gate_up)
        grad_gate_up = torch.empty_like(gate_up)
        _backward_kernel(
            grad.data_ptr(),
            gate_up.data_ptr(),
            DTYPE_CODES[gate_up.dtype],
            grad_gate_up.data_ptr(),
            gate_up.shape[:-1].numel(),
            gate_up.shape[-1] // 2,
            thread_count(),
        )
        return grad_gate_up
