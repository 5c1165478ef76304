"""The codec of `consistency.quant` on GPUs: the integer arithmetic of cpu/microscaling.hpp.

Order of reduction:
    A block's scale follows from a maximum of integers, which has no order; the rest is done element
    by element. The bytes are those of the CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from consistency.errors import UnsupportedError
from consistency.kernels._dispatch import values_readable
from consistency.kernels.triton.launch import blocks_of, launch

if TYPE_CHECKING:
    from consistency.quant.formats import BlockFormat

_BLOCK = 32
# Blocks of one program: 1024 elements, few enough to stay in registers.
_BLOCKS = 32
_NO_FAULT = (1 << 31) - 1


@triton.jit
def _encode4(magnitude, byte):
    """Codes without signs. A tie goes to the even code, so odd codes begin one above a midpoint."""
    quarter = tl.where(byte > 2, (byte - 2) << 23, 0x400000)
    code = (magnitude > quarter).to(tl.int32)
    code += (magnitude >= (((byte - 1) << 23) | 0x400000)).to(tl.int32)
    code += (magnitude > ((byte << 23) | 0x200000)).to(tl.int32)
    code += (magnitude >= ((byte << 23) | 0x600000)).to(tl.int32)
    code += (magnitude > (((byte + 1) << 23) | 0x200000)).to(tl.int32)
    code += (magnitude >= (((byte + 1) << 23) | 0x600000)).to(tl.int32)
    code += (magnitude > (((byte + 2) << 23) | 0x200000)).to(tl.int32)
    return code


@triton.jit
def _decode4(code, byte):
    half = (byte - 1) << 23
    return tl.where(code == 0, 0, half + tl.where(code == 1, 0, code << 22))


@triton.jit
def _encode8(magnitude, byte):
    field = magnitude >> 23
    exponent = tl.where(field == 0, 1, field)
    mantissa = magnitude & 0x7FFFFF
    significand = tl.where(field == 0, mantissa, mantissa | 0x800000)
    below = byte - 6 - exponent
    shift = 20 + tl.minimum(tl.maximum(below, 0), 6)
    odd = (significand >> shift) & 1
    one = tl.full(shift.shape, 1, tl.int32)
    rounded = (significand + (one << (shift - 1)) - 1 + odd) >> shift
    return tl.minimum((tl.maximum(-below, 0) << 3) + rounded, 0x7E)


@triton.jit
def _decode8(code, byte):
    field = code >> 3
    mantissa = code & 7
    high = tl.where(mantissa >= 4, 2, tl.where(mantissa >= 2, 1, 0))
    small = ((high + byte - 9) << 23) | ((mantissa << (23 - high)) & 0x7FFFFF)
    normal = ((field - 7 + byte) << 23) | (mantissa << 20)
    return tl.where(field > 0, normal, tl.where(mantissa == 0, 0, small))


@triton.jit
def _quantise(
    x,
    packed,
    scales,
    out,
    fault,
    blocks,
    CARRY: tl.constexpr,
    WIDE: tl.constexpr,
    BITS: tl.constexpr,
    LARGEST: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    PACK: tl.constexpr,
    VALUES: tl.constexpr,
    OUT_WIDE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < blocks
    places = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    loaded = tl.load(x + places, mask=inside[:, None], other=0.0)
    if WIDE:
        bits = loaded.to(tl.int32, bitcast=True)
    else:
        bits = loaded.to(tl.int16, bitcast=True).to(tl.int32) << 16
    magnitude = bits & 0x7FFFFFFF
    largest = tl.max(magnitude, 1)
    too_large = largest >= 0x7F800000  # pyright: ignore[reportOperatorIssue]
    tl.atomic_min(fault + block * 0, block.to(tl.int32), mask=inside & too_large)
    largest = tl.minimum(largest, 0x7F7FFFFF)
    byte = ((largest + CARRY) >> 23) - LARGEST
    byte = tl.minimum(tl.maximum(byte, FIRST), LAST)
    code = _encode4(magnitude, byte[:, None]) if BITS == 4 else _encode8(magnitude, byte[:, None])
    empty = tl.max(code, 1) == 0
    byte = tl.where(empty, FIRST, byte)
    negative = tl.where(empty[:, None], 0, bits < 0).to(tl.int32)  # pyright: ignore[reportIndexIssue]
    if PACK:
        tl.store(scales + block, byte.to(tl.uint8), mask=inside)
        signed = code | (negative << (BITS - 1))
        if BITS == 4:
            low, high = tl.split(tl.reshape(signed, (BLOCKS, 16, 2)))
            bytes_of = block[:, None] * 16 + tl.arange(0, 16)[None, :]
            tl.store(packed + bytes_of, (low | (high << 4)).to(tl.uint8), mask=inside[:, None])
        else:
            tl.store(packed + places, signed.to(tl.uint8), mask=inside[:, None])
    if VALUES:
        value = _decode4(code, byte[:, None]) if BITS == 4 else _decode8(code, byte[:, None])
        value = value | (negative << 31)
        _store(out, places, value, inside, OUT_WIDE)


@triton.jit
def _store(out, places, bits, inside, OUT_WIDE: tl.constexpr):
    if OUT_WIDE:
        tl.store(out + places, bits.to(tl.float32, bitcast=True), mask=inside[:, None])
    else:
        half = (bits >> 16).to(tl.int16)
        tl.store(out + places, half.to(tl.bfloat16, bitcast=True), mask=inside[:, None])


@triton.jit
def _dequantise(
    packed,
    scales,
    out,
    fault,
    blocks,
    BITS: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    OUT_WIDE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < blocks
    places = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    byte = tl.load(scales + block, mask=inside, other=FIRST).to(tl.int32)
    bad = (byte < FIRST) | (byte > LAST)
    if BITS == 4:
        bytes_of = block[:, None] * 16 + tl.arange(0, 16)[None, :]
        pair = tl.load(packed + bytes_of, mask=inside[:, None], other=0).to(tl.int32)
        signed = tl.reshape(tl.join(pair & 15, pair >> 4), (BLOCKS, 32))
        value = _decode4(signed & 7, byte[:, None]) | ((signed >> 3) << 31)
    else:
        signed = tl.load(packed + places, mask=inside[:, None], other=0).to(tl.int32)
        bad = bad | (tl.max(signed & 0x7F, 1) == 0x7F)
        value = _decode8(signed & 0x7F, byte[:, None]) | ((signed >> 7) << 31)
    tl.atomic_min(fault + block * 0, block.to(tl.int32), mask=inside & bad)
    _store(out, places, value, inside, OUT_WIDE)


def quantise_blocks(
    x: torch.Tensor,
    block_format: BlockFormat,
    *,
    source: torch.dtype,
    carry: int,
    given: torch.Tensor | None,
    packed: torch.Tensor | None,
    scales: torch.Tensor | None,
    out: torch.Tensor | None,
) -> int:
    """See `consistency.kernels.microscaling.quantise_blocks`.

    Raises:
        UnsupportedError: scales are given; that exists on the CPU alone.
    """
    if given is not None:
        raise UnsupportedError("given scales exist on the CPU alone: move x there")
    # Rounded by a kernel of its own: within this one, ptxas spills on sm_90 and sm_100.
    x = x.to(source)
    first, last = block_format.scale_range
    blocks = x.numel() // _BLOCK
    fault = torch.full((1,), _NO_FAULT, dtype=torch.int32, device=x.device)
    launch(
        _quantise,
        blocks_of(blocks, _BLOCKS),
        x,
        x if packed is None else packed,
        x if scales is None else scales,
        x if out is None else out,
        fault,
        blocks,
        on=x,
        CARRY=carry,
        WIDE=x.dtype == torch.float32,
        BITS=block_format.code,
        LARGEST=block_format.largest_exponent,
        FIRST=first,
        LAST=last,
        PACK=packed is not None,
        VALUES=out is not None,
        OUT_WIDE=out is not None and out.dtype == torch.float32,
        BLOCKS=_BLOCKS,
    )
    return _first_fault(fault)


def dequantise_blocks(
    packed: torch.Tensor, scales: torch.Tensor, block_format: BlockFormat, out: torch.Tensor
) -> int:
    """See `consistency.kernels.microscaling.dequantise_blocks`.

    Scale bytes outside `BlockFormat.scale_range`, which the codec never writes, are faults here;
    the CPU reads those whose values the dtype holds.
    """
    first, last = block_format.scale_range
    fault = torch.full((1,), _NO_FAULT, dtype=torch.int32, device=packed.device)
    launch(
        _dequantise,
        blocks_of(scales.numel(), _BLOCKS),
        packed,
        scales,
        out,
        fault,
        scales.numel(),
        on=packed,
        BITS=block_format.code,
        FIRST=first,
        LAST=last,
        OUT_WIDE=out.dtype == torch.float32,
        BLOCKS=_BLOCKS,
    )
    return _first_fault(fault)


def _first_fault(fault: torch.Tensor) -> int:
    """The first block at fault or -1; -1 too while values cannot be read (a CUDA graph)."""
    if not values_readable(fault):
        return -1
    found = int(fault.item())
    return -1 if found == _NO_FAULT else found
