"""The codec and packed products in Triton give the bytes of plain torch."""

from __future__ import annotations

import pytest
import torch

from consistency import kernels
from consistency.errors import InvalidInputError
from consistency.quant import BlockFormat, QuantSettings, ScaleRule, pack, qdq, unpack
from consistency.quant.reference import reference_pack, reference_qdq

SETTINGS = [
    QuantSettings(scale_rule=rule, format=kind, source_dtype=source)
    for rule in ScaleRule
    for kind in BlockFormat
    for source in ("bfloat16", "float32")
]


def adversarial() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((70, 64), generator=generator)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 6.5, 7.0, 464.0, 0.0, -0.0])
    picked = ties[torch.randint(len(ties), (70, 64), generator=generator)]
    x = torch.where(torch.rand((70, 1), generator=generator) < 0.5, x, picked.copysign(x))
    x = x * torch.exp2(torch.randint(-140, 119, (70, 1), generator=generator).float())
    x[:5] = 0
    return x.clamp(-3e38, 3e38)


@pytest.mark.parametrize(
    "settings", SETTINGS, ids=lambda s: f"{s.format.value}-{s.scale_rule.value}-{s.source_dtype}"
)
def test_codes_scales_and_values_are_those_of_plain_torch(settings):
    wide = adversarial()
    for x in (wide, wide.to(settings.source)):
        codes, scales = reference_pack(x, settings)
        values = reference_qdq(x, settings)
        found = pack(x, settings)
        assert torch.equal(found.scales, scales)
        assert torch.equal(found.codes, codes)
        for dtype in (torch.float32, torch.bfloat16):
            again = qdq(x, settings, out_dtype=dtype)
            assert torch.equal(unpack(found, dtype=dtype), again)
            assert torch.equal(again.double(), values.double())
            assert torch.equal(again.signbit(), values.signbit())


def test_faults_name_the_first_element():
    settings = QuantSettings(scale_rule=ScaleRule.RCEIL)
    x = torch.zeros(200, 64)
    x[190, 3] = float("nan")
    x[150, 40] = float("inf")
    with pytest.raises(InvalidInputError, match=r"x\[150, 40\] is inf"):
        qdq(x, settings)
    packed = pack(torch.zeros(2, 32), settings)
    packed.scales[1, 0] = 255
    with pytest.raises(InvalidInputError, match="scale byte 255"):
        unpack(packed)


def test_packed_products_are_the_products_of_their_values():
    settings = QuantSettings(scale_rule=ScaleRule.RCEIL)
    x = torch.randn(9, 128).bfloat16()
    weight = pack(torch.randn(3, 40, 128), settings)
    offsets = torch.tensor([0, 4, 4, 9])
    dense = unpack(weight)
    assert torch.equal(
        kernels.mxfp4_grouped_linear(x, weight.codes, weight.scales, offsets),
        kernels.grouped_linear(x, dense, offsets),
    )
    assert torch.equal(
        kernels.mxfp4_linear(x, weight.codes[0], weight.scales[0]), kernels.linear(x, dense[0])
    )
