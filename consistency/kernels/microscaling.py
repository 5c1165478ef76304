"""Quantisation in blocks of 32 with shared power-of-two scales: the kernels behind `quant`.

These functions take checked, contiguous tensors; `consistency.quant` is the public face.

Order of reduction:
    A block's scale follows from the largest magnitude of its 32 elements. A maximum of integers has
    no order, and everything else is done element by element, in integers.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from consistency.kernels._arguments import DTYPE_CODES
from consistency.kernels._dispatch import on_triton, one_device, triton_kernels
from consistency.kernels.library import INT32, INT64, POINTER, Kernel, thread_count

if TYPE_CHECKING:
    from consistency.quant.formats import BlockFormat

BLOCK = 32
"""Elements that share a scale."""

_quantise = Kernel(
    "lockstep_microscaling_quantise",
    *(INT32, POINTER, INT32, INT32, INT64, INT64, POINTER, POINTER, POINTER, POINTER, INT32),
    *(POINTER, INT32),
)
_dequantise = Kernel(
    "lockstep_microscaling_dequantise",
    *(INT32, POINTER, POINTER, INT64, POINTER, INT32, POINTER, INT32),
)


@one_device
def quantise_blocks(
    x: torch.Tensor,
    block_format: BlockFormat,
    *,
    source: torch.dtype,
    carry: int,
    given: torch.Tensor | None = None,
    packed: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> int:
    """Quantises the consecutive blocks of `x` and writes the results that are asked for.

    Args:
        x: float32 or bfloat16, contiguous, a multiple of 32 elements.
        block_format: element format.
        source: float32 or bfloat16: what `x` is rounded to first.
        carry: the scale rule, see `ScaleRule.carry`.
        given: uint8, a scale byte per block to use instead of the rule's.
        packed: uint8, receives the codes, `block_format.block_bytes` per block.
        scales: uint8, receives a scale byte per block.
        out: float32 or bfloat16, receives the values that the codes stand for.

    Returns:
        -1, or the first block that holds NaN or infinity or has the given byte 255; the results
        are then not to be used.
    """
    if on_triton(x):
        return triton_kernels("microscaling").quantise_blocks(
            x,
            block_format,
            source=source,
            carry=carry,
            given=given,
            packed=packed,
            scales=scales,
            out=out,
        )
    fault = ctypes.c_int64(-1)
    _quantise(
        block_format.code,
        x.data_ptr(),
        DTYPE_CODES[x.dtype],
        DTYPE_CODES[source],
        x.numel() // BLOCK,
        carry,
        _address(given),
        _address(packed),
        _address(scales),
        _address(out),
        DTYPE_CODES[torch.float32 if out is None else out.dtype],
        ctypes.addressof(fault),
        thread_count(),
    )
    return fault.value


@one_device
def dequantise_blocks(
    packed: torch.Tensor, scales: torch.Tensor, block_format: BlockFormat, out: torch.Tensor
) -> int:
    """Writes the values of packed blocks to `out`, float32 or bfloat16, contiguous.

    Returns:
        -1, or the first block with scale byte 255, a NaN code, or a value that the dtype of `out`
        does not hold exactly.
    """
    if on_triton(packed):
        return triton_kernels("microscaling").dequantise_blocks(packed, scales, block_format, out)
    fault = ctypes.c_int64(-1)
    _dequantise(
        block_format.code,
        packed.data_ptr(),
        scales.data_ptr(),
        scales.numel(),
        out.data_ptr(),
        DTYPE_CODES[out.dtype],
        ctypes.addressof(fault),
        thread_count(),
    )
    return fault.value


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
