"""The codec against the published vectors, an fp64 oracle, its plain torch twin, and bad input."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.kernels import library, microscaling
from consistency.quant import (
    BlockFormat,
    PackedTensor,
    QuantSettings,
    ScaleRule,
    pack,
    pack_with_scales,
    qdq,
    unpack,
)
from consistency.quant.reference import (
    reference_codes,
    reference_pack,
    reference_qdq,
    reference_values,
)

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
RULES = list(ScaleRule)
SETTINGS = [QuantSettings(scale_rule=rule, format=kind) for rule in RULES for kind in BlockFormat]
RCEIL = QuantSettings(scale_rule=ScaleRule.RCEIL)


def describe(settings: QuantSettings) -> str:
    return f"{settings.format.value}-{settings.scale_rule.value}"


def block_of(*values: float) -> torch.Tensor:
    return torch.tensor([*values, *[0.0] * (32 - len(values))], dtype=torch.bfloat16)


def codes_of(packed: PackedTensor) -> list[int]:
    return [
        nibble for byte in packed.codes.reshape(-1).tolist() for nibble in (byte & 15, byte >> 4)
    ]


VECTORS = [
    (
        [6, 0.25, -0.25, 0.75, -0.75, 1.25, -1.25, 1.75, 2.5, -2.5, 3.5, 5, -5, -0.0],
        dict.fromkeys((ScaleRule.FLOOR, ScaleRule.EVEN, ScaleRule.RCEIL), (127, "7082a2a44c66e8")),
    ),
    (
        [7, 1, -3, 0.5, 5],
        {
            ScaleRule.RCEIL: (128, "61b04"),
            ScaleRule.EVEN: (128, "61b04"),
            ScaleRule.FLOOR: (127, "72d16"),
        },
    ),
    (
        [6.5, 1, -3, 0.5, 5, 0.6],
        {
            ScaleRule.RCEIL: (128, "51b041"),
            ScaleRule.FLOOR: (127, "72d161"),
            ScaleRule.EVEN: (127, "72d161"),
        },
    ),
    ([4, 0.3, -0.8, 1.1], dict.fromkeys(RULES, (127, "61a2"))),
    ([0.0, -0.0], dict.fromkeys(RULES, (2, "00"))),
]


@pytest.mark.parametrize(("values", "results"), VECTORS, ids=["ties", "7", "6.5", "4", "zero"])
def test_reference_vectors(values, results):
    for rule, (byte, codes) in results.items():
        packed = pack(block_of(*values), QuantSettings(scale_rule=rule))
        assert packed.scales.tolist() == [byte], rule
        found = codes_of(packed)
        assert found[: len(codes)] == [int(code, 16) for code in codes], rule
        assert not any(found[len(codes) :])


def test_every_scale_rule_agrees_with_exact_arithmetic_on_every_bf16_magnitude():
    # ceil(log2(amax / 6)) in floating point is wrong for some of these; integers are not.
    magnitudes = torch.arange(1, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.zeros(len(magnitudes), 32, dtype=torch.bfloat16)
    x[:, 7] = magnitudes
    exact = magnitudes.double()
    mantissa, exponent = torch.frexp(exact)
    mantissa, exponent = mantissa * 2, exponent.to(torch.int64) - 1
    for kind in BlockFormat:
        top = 1.5 if kind is BlockFormat.MXFP4 else 1.75
        step = 2.0**-kind.mantissa_bits
        wanted = {
            ScaleRule.FLOOR: exponent,
            ScaleRule.EVEN: exponent + (mantissa >= 2 - step / 2),
            ScaleRule.RCEIL: exponent + (mantissa > top),
            ScaleRule.CEIL: exponent + (mantissa > 1),
        }
        for rule, power in wanted.items():
            scales = pack(x, QuantSettings(scale_rule=rule, format=kind)).scales.squeeze(1)
            byte = (power - kind.largest_exponent + 127).clamp(*kind.scale_range)
            assert torch.equal(scales.long(), byte), (rule, kind)


def test_every_bf16_value_under_every_scale_byte_against_an_fp64_oracle():
    magnitudes = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.cat((magnitudes, -magnitudes)).unflatten(0, (2, -1, 32))
    exact = magnitudes.double()
    grid = torch.tensor(VALUES, dtype=torch.float64)
    midpoints = (grid[1:] + grid[:-1]) / 2
    for byte in range(255):
        scale = 2.0 ** (byte - 127)
        # The magnitudes ascend, so the oracle is a search for the first one of every code: at or
        # above the midpoint below an even code, above the one below an odd code.
        starts = torch.where(
            torch.tensor([False, True] * 3 + [False]),
            torch.searchsorted(exact, midpoints * scale),
            torch.searchsorted(exact, midpoints * scale, right=True),
        )
        wanted = torch.zeros(len(exact), dtype=torch.uint8)
        for start in starts.tolist():
            wanted[start:] += 1
        wanted = wanted.unflatten(0, (-1, 32))
        signed = wanted | torch.where(wanted.amax(-1, keepdim=True) == 0, 0, 8).to(torch.uint8)
        codes = torch.stack((wanted, signed))
        scales = torch.full((2, len(wanted), 1), byte, dtype=torch.uint8)
        packed = pack_with_scales(x, scales, RCEIL)
        assert torch.equal(packed.codes, codes[..., 0::2] | codes[..., 1::2] << 4)
        if byte <= 252:
            values = (grid * scale)[wanted.long()]
            values = torch.stack((values, torch.where(signed >= 8, -values, values)))
            assert torch.equal(unpack(packed).double(), values)


@pytest.mark.parametrize("kind", BlockFormat, ids=lambda kind: kind.value)
def test_every_code_under_every_scale_byte_decodes_exactly_or_is_refused(kind):
    codes = torch.arange(256, dtype=torch.uint8)
    if kind is BlockFormat.MXFP8:
        codes = codes[(codes & 0x7F) != 0x7F]
        codes = torch.cat((codes, codes[:2]))
    blocks = codes.unflatten(0, (-1, kind.block_bytes))
    chosen = QuantSettings(scale_rule=ScaleRule.RCEIL, format=kind)
    elements = blocks
    if kind is BlockFormat.MXFP4:
        elements = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    first, last = kind.scale_range
    for byte in range(256):
        scales = torch.full((len(blocks), 1), byte, dtype=torch.uint8)
        packed = PackedTensor(blocks, scales, chosen)
        exact = reference_values(elements, scales.int(), chosen)
        for dtype in (torch.bfloat16, torch.float32):
            if byte < 255 and torch.equal(exact.to(dtype).double(), exact):
                assert torch.equal(unpack(packed, dtype=dtype).double(), exact)
            else:
                assert not first <= byte <= last
                with pytest.raises(InvalidInputError, match=f"scale byte {byte}"):
                    unpack(packed, dtype=dtype)


def adversarial(seed: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Ties, neighbours of ties, all magnitudes, signed zeros, empty and near-empty blocks."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((rows, 64), generator=generator)
    x = x * torch.exp2(torch.randint(-130, 128, (rows, 1), generator=generator).float())
    x = x.clamp(-3e38, 3e38)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 6.5, 7, 4, 464, 448, 0.0, -0.0])
    picked = ties[torch.randint(len(ties), (rows, 64), generator=generator)]
    picked = torch.copysign(picked, torch.randn((rows, 64), generator=generator))
    picked *= torch.exp2(torch.randint(-20, 20, (rows, 1), generator=generator).float())
    kind = torch.randint(4, (rows, 1), generator=generator)
    x = torch.where(kind == 1, picked, x)
    sparse = torch.where(torch.rand((rows, 64), generator=generator) < 0.02, x, x * 0.0)
    x = torch.where(kind == 2, sparse, x)
    return x.to(dtype)


@pytest.mark.parametrize("chosen", SETTINGS, ids=describe)
@pytest.mark.parametrize("source", ["bfloat16", "float32"])
def test_the_kernels_write_the_bytes_of_plain_torch(chosen, source):
    values = {**chosen.to_mapping(), "source_dtype": source}
    chosen = QuantSettings.from_mapping(values)
    for dtype in {chosen.source, torch.float32}:
        x = adversarial(3, 2000, dtype)
        packed = pack(x, chosen)
        codes, scales = reference_pack(x, chosen)
        assert torch.equal(packed.scales, scales)
        assert torch.equal(packed.codes, codes)
        once = qdq(x, chosen)
        assert torch.equal(once.double(), reference_qdq(x, chosen).double())
        for out_dtype in (torch.bfloat16, torch.float32):
            again = unpack(packed, dtype=out_dtype)
            assert torch.equal(qdq(x, chosen, out_dtype=out_dtype), again)
            assert torch.equal(again.signbit(), qdq(x, chosen, out_dtype=out_dtype).signbit())


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    shape=st.lists(st.integers(0, 5), max_size=3),
    blocks=st.integers(0, 4),
    chosen=st.sampled_from(SETTINGS),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_shapes_strides_and_empty_tensors(seed, shape, blocks, chosen, dtype):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((*shape, 32 * blocks), generator=generator).to(dtype)
    packed = pack(x, chosen)
    assert packed.shape == x.shape
    assert torch.equal(qdq(x, chosen), unpack(packed, dtype=dtype))
    spread = torch.stack((x, x + 1), -1)[..., 0]
    assert torch.equal(pack(spread, chosen).codes, packed.codes)
    expanded = x[None].expand(2, *x.shape)
    assert torch.equal(qdq(expanded, chosen)[1], qdq(x, chosen))


@pytest.mark.parametrize("first", RULES, ids=lambda rule: rule.value)
def test_quantising_again_changes_no_value_unless_ceil_follows_another_rule(first):
    x = adversarial(5, 1000, torch.bfloat16)
    once = qdq(x, QuantSettings(scale_rule=first))
    for second in RULES:
        again = qdq(once, QuantSettings(scale_rule=second))
        # CEIL doubles the scale of a block whose largest code is 6 or 3, and halves become ties.
        kept = second is not ScaleRule.CEIL or first is ScaleRule.CEIL
        assert torch.equal(again, once) is kept


def test_a_float32_master_is_rounded_to_the_source_dtype_first():
    x = adversarial(7, 2000, torch.float32)
    assert torch.equal(pack(x, RCEIL).codes, pack(x.bfloat16(), RCEIL).codes)
    exact = QuantSettings(scale_rule=ScaleRule.RCEIL, source_dtype="float32")
    assert not torch.equal(pack(x, RCEIL).codes, pack(x, exact).codes)


def test_threads_and_instruction_sets_change_no_bit(monkeypatch):
    x = adversarial(11, 5000, torch.bfloat16)
    for chosen in SETTINGS:
        expected = pack(x, chosen)
        for variant in library.runnable_variants():
            with monkeypatch.context() as patch:
                patch.setattr(microscaling, "_quantise", microscaling._quantise.on(variant))
                patch.setattr(microscaling, "_dequantise", microscaling._dequantise.on(variant))
                for threads in (1, 2):
                    patch.setattr(microscaling, "thread_count", lambda count=threads: count)
                    found = pack(x, chosen)
                    assert torch.equal(found.codes, expected.codes)
                    assert torch.equal(found.scales, expected.scales)
                    assert torch.equal(unpack(found), qdq(x, chosen))


def test_what_cannot_be_quantised_is_refused_in_one_line():
    x = torch.zeros(3, 64, dtype=torch.bfloat16)
    bad = x.clone()
    bad[1, 40] = float("nan")
    with pytest.raises(InvalidInputError, match=r"w\[1, 40\] is nan"):
        pack(bad, RCEIL, name="w")
    bad[1, 40] = float("-inf")
    with pytest.raises(InvalidInputError, match=r"x\[1, 40\] is -inf"):
        qdq(bad, RCEIL)
    with pytest.raises(InvalidInputError, match=r"x\[0, 1\] is inf as bfloat16"):
        pack(torch.tensor([[0.0, 3.4e38] + [0.0] * 30]), RCEIL)
    with pytest.raises(InvalidInputError, match="contraction axis 0"):
        pack(x, RCEIL, axis=0)
    with pytest.raises(InvalidInputError, match="multiple of 32"):
        pack(x[:, :33], RCEIL)
    with pytest.raises(InvalidInputError, match="packed already"):
        pack(pack(x, RCEIL), RCEIL)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="packed already"):
        pack(pack(x, RCEIL).codes, RCEIL)
    with pytest.raises(UnsupportedError, match="source_dtype is float32"):
        pack(x, QuantSettings(scale_rule=ScaleRule.EVEN, source_dtype="float32"))
    with pytest.raises(UnsupportedError, match="float16"):
        pack(x.half(), RCEIL)
    with pytest.raises(InvalidInputError, match="scalar"):
        pack(torch.tensor(1.0), RCEIL)
    with pytest.raises(InvalidInputError, match="byte 255"):
        pack_with_scales(x, torch.full((3, 2), 255, dtype=torch.uint8), RCEIL)
    with pytest.raises(InvalidInputError, match="codes have shape"):
        PackedTensor(torch.zeros(3, 16, dtype=torch.uint8), torch.zeros(3, 2).byte(), RCEIL)
    with pytest.raises(InvalidInputError, match="scale_rule is 'rceil'"):
        QuantSettings(scale_rule="rceil")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="ties is 'away'"):
        QuantSettings(scale_rule=ScaleRule.EVEN, ties="away")


def test_settings_survive_a_round_trip_and_refuse_gaps():
    for chosen in SETTINGS:
        assert QuantSettings.from_mapping(chosen.to_mapping()) == chosen
    values = RCEIL.to_mapping()
    del values["scale_rule"]
    with pytest.raises(InvalidInputError, match="lack scale_rule"):
        QuantSettings.from_mapping(values)
    with pytest.raises(InvalidInputError, match="scale_rule is 'up'"):
        QuantSettings.from_mapping({**RCEIL.to_mapping(), "scale_rule": "up"})


def test_mxfp8_elements_round_as_torch_float8_does():
    x = adversarial(13, 3000, torch.bfloat16)
    chosen = QuantSettings(scale_rule=ScaleRule.FLOOR, format=BlockFormat.MXFP8)
    packed = pack(x, chosen)
    assert torch.equal(packed.codes, reference_codes(x, packed.scales.int(), chosen))
