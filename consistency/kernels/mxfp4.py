"""Products with packed MXFP4 weights: bf16 multiplications, unpacking inside the kernel.

A code times its scale is a bf16 number, and the loops are those of `linear` and `grouped_linear`.
The result therefore has the bits of the same product with the weight that the codes stand for: a
rollout engine may serve packed weights while the learner trains on their QDQ.
"""

from __future__ import annotations

import struct

import torch

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.kernels._arguments import (
    DTYPE_CODES,
    output_dtype_code,
    require_float,
    require_integer,
    require_shape,
)
from consistency.kernels._dispatch import on_triton, one_device, triton_kernels
from consistency.kernels._gemm import chunk_count
from consistency.kernels.grouped import require_offsets
from consistency.kernels.library import POINTER, Kernel, thread_count
from consistency.kernels.microscaling import BLOCK
from consistency.kernels.moe import routed_experts

# Mirrors Mxfp4Request in cpu/mxfp4_gemm.cpp.
_pack_request = struct.Struct("=18q").pack
_grouped = Kernel("lockstep_mxfp4_grouped", POINTER)


@one_device
def mxfp4_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    tp_invariant: bool = False,
) -> torch.Tensor:
    """y[..., n] = sum over k of x[..., k] weight[n, k] + bias[n] for a packed weight.

    Args:
        x: [..., K], float32, bfloat16 or float16, any strides; K a multiple of 32.
        codes: uint8 [N, K / 2], see `consistency.quant.PackedTensor`.
        scales: uint8 [N, K / 32], none of them 255.
        bias: [N], or None.
        out_dtype: dtype of the result; by default that of `x`.
        tp_invariant: cut K into chunks, as in `linear`.

    Returns:
        [..., N] in `out_dtype`.

    Raises:
        UnsupportedError: a dtype, or a gradient is wanted: learners train on QDQ weights.
        InvalidInputError: shapes that do not fit.

    Order of reduction:
        That of ``linear(x, unpack(codes, scales))``, whose bits it gives.
    """
    require_float("x", x)
    _require_packed(codes, scales, 2)
    _require_width(x, scales)
    _require_no_gradient(x, bias)
    if bias is not None:
        require_float("bias", bias)
        require_shape("bias", bias, codes.shape[:1], "one per row of the weight")
        bias = bias.contiguous()
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    offsets = torch.tensor([0, rows.shape[0]])
    out = _forward(rows, codes[None], scales[None], offsets, bias, out_dtype, tp_invariant)
    return out.view(*x.shape[:-1], codes.shape[0])


@one_device
def mxfp4_grouped_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    tp_invariant: bool = False,
) -> torch.Tensor:
    """`grouped_linear` for packed weights.

    Args:
        x: [T, K], rows sorted by expert; K a multiple of 32.
        codes: uint8 [E, N, K / 2].
        scales: uint8 [E, N, K / 32], none of them 255.
        offsets: int64 [E + 1], from 0 to T, never falling.
        out_dtype, tp_invariant: as in `mxfp4_linear`.

    Returns:
        [T, N] in `out_dtype`.

    Raises:
        UnsupportedError, InvalidInputError: as `mxfp4_linear`.

    Order of reduction:
        That of ``grouped_linear(x, unpack(codes, scales), offsets)``, whose bits it gives.
    """
    require_float("x", x, 2)
    _require_packed(codes, scales, 3)
    _require_width(x, scales)
    _require_no_gradient(x)
    require_offsets(offsets, codes.shape[0], x.shape[0])
    return _forward(x, codes, scales, offsets.contiguous(), None, out_dtype, tp_invariant)


@one_device
def mxfp4_moe_experts(
    x: torch.Tensor,
    gate_up_codes: torch.Tensor,
    gate_up_scales: torch.Tensor,
    down_codes: torch.Tensor,
    down_scales: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    tp_invariant: bool = False,
) -> torch.Tensor:
    """`moe_experts` for packed experts.

    Args:
        x: [T, H], float32, bfloat16 or float16; H and I multiples of 32.
        gate_up_codes, gate_up_scales: uint8 [E, 2 I, H / 2] and [E, 2 I, H / 32].
        down_codes, down_scales: uint8 [E, H, I / 2] and [E, H, I / 32].
        weights, ids, tp_invariant: as in `moe_experts`.

    Returns:
        [T, H] in the dtype of `x`.

    Raises:
        UnsupportedError, InvalidInputError: as `mxfp4_linear` and `moe_experts`.

    Order of reduction:
        That of `moe_experts` with the weights that the codes stand for, whose bits it gives.
    """
    _require_packed(gate_up_codes, gate_up_scales, 3)
    _require_packed(down_codes, down_scales, 3)
    _require_no_gradient(x, weights)
    return routed_experts(
        x,
        weights,
        ids,
        _shape(gate_up_scales),
        _shape(down_scales),
        lambda rows, offsets: mxfp4_grouped_linear(
            rows, gate_up_codes, gate_up_scales, offsets, tp_invariant=tp_invariant
        ),
        lambda hidden, offsets: mxfp4_grouped_linear(
            hidden,
            down_codes,
            down_scales,
            offsets,
            out_dtype=torch.float32,
            tp_invariant=tp_invariant,
        ),
    )


def _forward(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    tp_invariant: bool,
) -> torch.Tensor:
    if out_dtype is None:
        out_dtype = x.dtype
    else:
        output_dtype_code(out_dtype)
    codes, scales = codes.contiguous(), scales.contiguous()
    groups, n, k = _shape(scales)
    chunks = chunk_count(k, tp_invariant)
    out = torch.empty((x.shape[0], n), dtype=out_dtype, device=x.device)
    if on_triton(x):
        return triton_kernels("mxfp4").multiply_packed(
            x, codes, scales, offsets.to(x.device), out, bias=bias, chunks=chunks
        )
    _grouped(
        _pack_request(
            *(groups, offsets.data_ptr(), n, k),
            *(x.data_ptr(), *x.stride(), DTYPE_CODES[x.dtype]),
            *(codes.data_ptr(), scales.data_ptr()),
            *((0, 0) if bias is None else (bias.data_ptr(), DTYPE_CODES[bias.dtype])),
            *(out.data_ptr(), *out.stride(), DTYPE_CODES[out_dtype]),
            *(chunks, thread_count()),
        )
    )
    return out


def _shape(scales: torch.Tensor) -> tuple[int, ...]:
    return (*scales.shape[:-1], scales.shape[-1] * BLOCK)


def _require_packed(codes: torch.Tensor, scales: torch.Tensor, dimensions: int) -> None:
    require_integer("codes", codes, dimensions, (torch.uint8,))
    require_integer("scales", scales, dimensions, (torch.uint8,))
    wanted = (*scales.shape[:-1], scales.shape[-1] * (BLOCK // 2))
    require_shape("codes", codes, wanted, "16 bytes per scale")


def _require_width(x: torch.Tensor, scales: torch.Tensor) -> None:
    width = scales.shape[-1] * BLOCK
    if x.dim() == 0 or x.shape[-1] != width:
        raise InvalidInputError(
            f"the last dimension of x must be {width} (32 per scale, scales are "
            f"{tuple(scales.shape)}), got x {tuple(x.shape)}"
        )


def _require_no_gradient(*tensors: torch.Tensor | None) -> None:
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise UnsupportedError(
            "packed weights have no gradient: train on their QDQ (consistency.quant.qdq), or "
            "compute under torch.no_grad()"
        )
