"""The codec once more, in plain torch: what the kernels are tested against, and readable.

It shares no code with the kernels, and works in float64, where every step is exact.
"""

from __future__ import annotations

import torch

from consistency.quant.formats import BLOCK, BlockFormat
from consistency.quant.settings import QuantSettings

_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def reference_scales(x: torch.Tensor, settings: QuantSettings) -> torch.Tensor:
    """int32 [..., K / 32]: the scale byte of every block of a finite tensor [..., K]."""
    bits = x.to(settings.source).float().view(torch.int32) & 0x7FFFFFFF
    largest = bits.unflatten(-1, (-1, BLOCK)).amax(-1).to(torch.int64)
    carry = settings.scale_rule.carry(settings.format)
    byte = ((largest + carry) >> 23) - settings.format.largest_exponent
    return byte.clamp(*settings.format.scale_range).to(torch.int32)


def reference_codes(x: torch.Tensor, scales: torch.Tensor, settings: QuantSettings) -> torch.Tensor:
    """uint8 [..., K]: the element codes under scale bytes [..., K / 32], in float64.

    Every product and comparison is exact: float64 holds all of fp32 times all powers of two.
    """
    blocks = x.to(settings.source).double().unflatten(-1, (-1, BLOCK))
    scaled = torch.ldexp(blocks, (127 - scales.double()).unsqueeze(-1))
    if settings.format is BlockFormat.MXFP8:
        rounded = scaled.clamp(-448, 448).float().to(torch.float8_e4m3fn)
        codes = rounded.view(torch.uint8)
        magnitudes = codes & 0x7F
    else:
        values = torch.tensor(_E2M1_VALUES, dtype=torch.float64)
        midpoints = (values[1:] + values[:-1]) / 2
        magnitudes = torch.bucketize(scaled.abs().contiguous(), midpoints)
        odd = magnitudes % 2 == 1
        tie = (scaled.abs().unsqueeze(-1) == midpoints).any(-1)
        # bucketize leaves a tie at the lower code; an odd lower code gives way to the even one.
        magnitudes = (magnitudes + (odd & tie)).to(torch.uint8)
        codes = magnitudes | (torch.signbit(blocks).to(torch.uint8) << 3)
    empty = (magnitudes == 0).all(-1, keepdim=True)
    return torch.where(empty, torch.zeros_like(codes), codes).flatten(-2)


def reference_values(
    codes: torch.Tensor, scales: torch.Tensor, settings: QuantSettings
) -> torch.Tensor:
    """float64 [..., K]: what element codes stand for."""
    if settings.format is BlockFormat.MXFP8:
        elements = codes.view(torch.float8_e4m3fn).double()
    else:
        elements = torch.tensor(_E2M1_VALUES, dtype=torch.float64)[(codes & 7).long()]
        elements = torch.where(codes >= 8, -elements, elements)
    blocks = elements.unflatten(-1, (-1, BLOCK))
    return torch.ldexp(blocks, (scales.double() - 127).unsqueeze(-1)).flatten(-2)


def reference_pack(x: torch.Tensor, settings: QuantSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """`pack` in plain torch: uint8 codes as stored, and uint8 scales."""
    scales = reference_scales(x, settings)
    codes = reference_codes(x, scales, settings)
    if settings.format is BlockFormat.MXFP4:
        pairs = codes.unflatten(-1, (-1, 2))
        codes = pairs[..., 0] | (pairs[..., 1] << 4)
    return codes, scales.to(torch.uint8)


def reference_qdq(x: torch.Tensor, settings: QuantSettings) -> torch.Tensor:
    """`qdq` in plain torch, in the settings' source dtype."""
    scales = reference_scales(x, settings)
    codes = reference_codes(x, scales, settings)
    return reference_values(codes, scales, settings).to(settings.source)
