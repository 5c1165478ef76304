# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false
# The body of a kernel is written in Triton's language, whose types are not those of Python.
"""silu_and_mul on a GPU; the public function is in `consistency.kernels.silu_and_mul`.

Order of reduction:
    None: each element depends on two elements. fp32 inside, one rounding at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistency.kernels.triton.launch import blocks_of, launch
from consistency.kernels.triton.rows import exponential
from consistency.kernels.triton.tile import rounded

_BLOCK = 1024


@triton.jit(do_not_specialize=["elements"])
def _forward_block(gate_up, out, elements, half, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < elements
    source = gate_up + places // half * 2 * half + places % half
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    result = tl.div_rn(gate, 1.0 + exponential(-gate)) * up
    tl.store(out + places, rounded(result, out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["elements"])
def _backward_block(grad, gate_up, grad_gate_up, elements, half, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < elements
    pair = places // half * 2 * half + places % half
    gate = tl.load(gate_up + pair, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + pair + half, mask=inside, other=0.0).to(tl.float32)
    outer = tl.load(grad + places, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.div_rn(1.0, 1.0 + exponential(-gate))
    slope = sigmoid * tl.fma(gate, 1.0 - sigmoid, 1.0)
    grad_gate = outer * up * slope
    grad_up = outer * (gate * sigmoid)
    kind: tl.constexpr = grad_gate_up.dtype.element_ty
    tl.store(grad_gate_up + pair, rounded(grad_gate, kind), mask=inside)
    tl.store(grad_gate_up + pair + half, rounded(grad_up, kind), mask=inside)


def forward(gate_up: torch.Tensor) -> torch.Tensor:
    """[..., I] for contiguous gate_up [..., 2 I]."""
    half = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], half))
    programs = blocks_of(out.numel(), _BLOCK)
    launch(_forward_block, programs, gate_up, out, out.numel(), half, on=out, BLOCK=_BLOCK)
    return out


def backward(grad: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """The gradient of contiguous gate_up."""
    out = torch.empty_like(gate_up)
    launch(
        _backward_block,
        blocks_of(grad.numel(), _BLOCK),
        grad,
        gate_up,
        out,
        *(grad.numel(), gate_up.shape[-1] // 2),
        on=out,
        BLOCK=_BLOCK,
    )
    return out
