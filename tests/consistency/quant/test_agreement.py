"""Other libraries' quantisers, run as they are, write our bytes under their own rules."""

from __future__ import annotations

import warnings

import pytest
import torch

from consistency.quant import BlockFormat, QuantSettings, ScaleRule, pack


def blocks(seed: int, rows: int = 4000) -> torch.Tensor:
    """Random and adversarial blocks of moderate magnitudes, none of them all zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((rows, 64), generator=generator)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 6.5, 7.0, 4.0, 0.0])
    picked = ties[torch.randint(len(ties), (rows, 64), generator=generator)]
    picked = torch.copysign(picked, x)
    x = torch.where(torch.rand((rows, 1), generator=generator) < 0.5, x, picked)
    x[:, ::32] = x[:, ::32].abs().clamp_min(0.5)
    x = x * torch.exp2(torch.randint(-40, 40, (rows, 1), generator=generator).float())
    return x.bfloat16()


@pytest.mark.parametrize("rule", ScaleRule, ids=lambda rule: rule.value)
@pytest.mark.parametrize("kind", BlockFormat, ids=lambda kind: kind.value)
def test_torchao_under_each_of_its_rules(rule, kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx
    element = torch.float4_e2m1fn_x2 if kind is BlockFormat.MXFP4 else torch.float8_e4m3fn
    x = blocks(1)
    scales, data = to_mx(x, element, 32, ScaleCalculationMode[rule.name])
    packed = pack(x, QuantSettings(scale_rule=rule, format=kind))
    scales = scales.view(torch.uint8)
    if rule is ScaleRule.RCEIL:
        # torchao takes ceil(log2(amax / 6)) in floating point on the CPU; it is one too high or too
        # low where the quotient is next to a power of two. Those blocks are counted, not compared.
        same = scales == packed.scales
        assert same.float().mean() > 0.98
    else:
        same = torch.ones_like(scales, dtype=torch.bool)
        assert torch.equal(scales, packed.scales)
    ours = packed.codes.unflatten(-1, (-1, kind.block_bytes))[same]
    theirs = data.view(torch.uint8).unflatten(-1, (-1, kind.block_bytes))[same]
    assert torch.equal(ours, theirs)


def without_negative_zeros(codes: torch.Tensor) -> torch.Tensor:
    low, high = codes & 15, codes >> 4
    return torch.where(low == 8, 0, low) | torch.where(high == 8, 0, high) << 4


def test_compressed_tensors_writes_the_values_of_even():
    from compressed_tensors.compressors.nvfp4.helpers import quantize_and_pack_fp4
    from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales

    x = blocks(2)
    exponents = generate_mx_scales(x.unflatten(-1, (-1, 32)).abs().amax(-1))
    codes = quantize_and_pack_fp4(x, torch.exp2(exponents.float() - 127), group_size=32)
    packed = pack(x, QuantSettings(scale_rule=ScaleRule.EVEN))
    assert torch.equal(exponents.to(torch.uint8), packed.scales)
    # It drops the sign of a number that is rounded to zero.
    assert torch.equal(without_negative_zeros(codes), without_negative_zeros(packed.codes))
