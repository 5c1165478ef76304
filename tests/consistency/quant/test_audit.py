"""The audit: equal values pass whatever their bytes are; every known way to differ is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from consistency.quant import PackedTensor, QuantSettings, ScaleRule, pack, pack_with_scales, qdq
from consistency.quant.alternatives import Alternative, alternatives, neighbours
from consistency.quant.audit import MatrixAudit, ModelWeights, audit, check_packed
from consistency.quant.layouts import CheckpointLayout

RCEIL = QuantSettings(scale_rule=ScaleRule.RCEIL)
FLOOR = QuantSettings(scale_rule=ScaleRule.FLOOR)
EXPERTS = "model.layers.0.mlp.experts"
NAME = "m.weight"


def weight(rows: int = 64, width: int = 96, seed: int = 0) -> torch.Tensor:
    """fp32, with ties under RCEIL, and blocks that every rule scales differently."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((rows, width), generator=generator) * 0.02
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    picked = ties[torch.randint(len(ties), (rows // 4, width), generator=generator)]
    x[: rows // 4] = torch.copysign(picked, x[: rows // 4])
    x[: rows // 4, ::32] = 6.0
    x[rows // 4 : rows // 2] *= 1.37
    return x


def only(engine, trainer, settings=RCEIL, **options) -> MatrixAudit:
    found = list(audit(ModelWeights(engine), ModelWeights(trainer), settings, **options))
    assert len(found) == 1
    return found[0]


def encode(values: torch.Tensor) -> PackedTensor:
    """A packing of values that are of some MXFP4 block: exact under FLOOR of their maximum."""
    packed = pack(values, replace(FLOOR, source_dtype="float32"))
    assert torch.equal(qdq(values, replace(FLOOR, source_dtype="float32")), values)
    return PackedTensor(packed.codes, packed.scales, RCEIL)


@pytest.mark.parametrize("source", ["float32", "bfloat16", "packed", "values"])
def test_the_trainers_values_pass_however_they_are_given(source):
    w = weight()
    packed = pack(w, RCEIL)
    trainer = {
        "float32": w,
        "bfloat16": w.bfloat16(),
        "packed": packed,
        "values": qdq(w, RCEIL),
    }[source]
    found = only({NAME: packed}, {NAME: trainer})
    assert found.passed and found.values_differ == 0
    # Values that were quantised before may get other scales; they are the same values.
    if source != "values":
        assert found == MatrixAudit(NAME, "equal", 64 * 96)


def test_other_bytes_of_the_same_values_pass_and_are_counted():
    x = torch.zeros(2, 32)
    x[:, :4] = torch.tensor([2.0, 1.0, -1.0, 0.0])
    packed = pack(x, RCEIL)
    other = pack_with_scales(x, packed.scales + 1, RCEIL)
    other.codes[other.codes == 0] = 0x88
    found = only({NAME: other}, {NAME: packed})
    assert found.passed and found.values_differ == 0 and found.max_abs_diff == 0
    assert found.scales_differ == 2 and found.codes_differ > 0


@pytest.mark.parametrize(
    ("alternative", "cause"),
    [
        (Alternative(ScaleRule.FLOOR), "scale rule floor"),
        (Alternative(ScaleRule.EVEN), "scale rule even"),
        (Alternative(ScaleRule.CEIL), "scale rule ceil"),
        (Alternative(ScaleRule.RCEIL, "away"), "ties away from zero"),
        (Alternative(ScaleRule.RCEIL, "zero"), "ties towards zero"),
        (Alternative(ScaleRule.RCEIL, "even", "float32"), "quantised from float32"),
        (
            Alternative(ScaleRule.RCEIL, through_fp8=True),
            "quantised twice, to FP8 first",
        ),
        (
            Alternative(ScaleRule.EVEN, "away", "float32"),
            "scale rule even, ties away from zero, quantised from float32",
        ),
        (
            Alternative(ScaleRule.RCEIL, "stochastic"),
            "each value is a neighbour under the right scales: stochastic or another rounding",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_quantiser_is_named(alternative, cause):
    w = weight()
    values = alternative.qdq(w, torch.Generator().manual_seed(1))
    found = only({NAME: encode(values)}, {NAME: w})
    expected = qdq(w, RCEIL)
    assert found.status == "differs" and not found.passed
    assert found.cause == cause
    assert found.values_differ == int((values != expected).sum()) > 0
    assert found.max_abs_diff == float((values.double() - expected.double()).abs().max())


def test_blocks_of_the_wrong_axis_are_named_although_they_were_quantised_again():
    w = weight()
    values = qdq(Alternative(ScaleRule.RCEIL, axis=-2).qdq(w), RCEIL)
    assert only({NAME: encode(values)}, {NAME: w}).cause == "blocks along the wrong axis"


def test_a_floating_point_logarithm_is_named():
    # Far from 1, bf16 has no bits left for how far the logarithm of amax / 6 is above an integer.
    wide = weight(64, 64)
    wide[32:, ::32] = 6 * 1.0078125 * 2.0**20
    wide[32:, 1::2] = 2.0**20 * torch.rand(32, 32)
    values = Alternative("log2").qdq(wide)
    assert not torch.equal(values, qdq(wide, RCEIL))
    found = only({NAME: encode(values)}, {NAME: wide})
    assert found.cause == "scale as ceil(log2(amax / 6)) in floating point"


def test_a_matrix_that_nothing_explains_has_no_cause():
    w = weight()
    packed = pack(w, RCEIL)
    packed.codes[3, 5] ^= 7
    found = only({NAME: packed}, {NAME: w})
    assert found.status == "differs" and found.cause == ""
    assert found.values_differ == 1 and found.codes_differ == 1 and found.scales_differ == 0


def test_nibbles_and_rows_in_another_order_are_named():
    w = weight()
    packed = pack(w, RCEIL)
    swapped = PackedTensor(packed.codes << 4 | packed.codes >> 4, packed.scales, RCEIL)
    for trainer in (w, packed):
        found = only({NAME: swapped}, {NAME: trainer})
        assert found.cause == "nibbles in the other order: the even index is in the high one"
    gate, up = weight(32, 64, 1), weight(32, 64, 2)
    names = [f"{EXPERTS}.0.{side}.weight" for side in ("gate_proj", "up_proj")]
    trainer = ModelWeights(dict(zip(names, (gate, up), strict=True)))
    stacked, mixed = torch.cat((gate, up)), torch.stack((gate, up), 1).flatten(0, 1)
    cases = [
        (torch.cat((up, gate)), "stacked", "gate and up are exchanged"),
        (stacked, "interleaved", "gate_up_proj is stacked where the engine reads interleaved rows"),
        (mixed, "stacked", "gate_up_proj is interleaved where the engine reads stacked rows"),
    ]
    for fused, order, cause in cases:
        served = {f"{EXPERTS}.gate_up_proj": pack(fused[None], RCEIL)}
        engine = ModelWeights(served, gate_up=order)  # type: ignore[arg-type]
        assert [found.cause for found in audit(engine, trainer, RCEIL)] == [cause, cause]


def test_layers_that_one_side_quantises_alone_and_tensors_of_one_side_are_found():
    w, norm = weight(), torch.ones(8)
    expert, linear = f"{EXPERTS}.0.down_proj.weight", "model.q_proj.weight"
    packed = pack(w, RCEIL)

    def statuses(engine, trainer, **options):
        found = audit(ModelWeights(engine), ModelWeights(trainer), RCEIL, **options)
        return {record.name: record.status for record in found}

    assert statuses({expert: w.bfloat16()}, {expert: packed}) == {expert: "not packed"}
    dense = statuses({expert: w.bfloat16()}, {expert: w}, targets="experts")
    assert dense == {expert: "not packed"}
    assert statuses({expert: w.bfloat16()}, {expert: w}) == {expert: "equal"}
    trainer = {expert: packed, linear: w}
    assert statuses({expert: packed, linear: packed}, trainer)[linear] == "packed"
    both = {expert: w, linear: w}
    found = statuses({expert: packed, linear: packed}, both, targets="experts")
    assert found == {expert: "equal", linear: "packed"}
    assert statuses({"n": norm}, {"n": norm + 1}) == {"n": "differs"}
    assert statuses({"n": norm.bfloat16()}, {"n": norm + 2**-12}) == {"n": "equal"}
    assert statuses({"n": norm}, {"o": norm}) == {"n": "unknown", "o": "missing"}
    own = {"engine_layout": CheckpointLayout.DEEPSEEK_V4}
    found = statuses({"n": norm}, {"o": norm, expert: w}, **own)
    assert found == {"n": "not compared", "o": "not compared", expert: "missing"}
    assert statuses({expert: packed}, {}) == {expert: "unknown"}
    # Dense in the engine is no fault while it holds the values that the trainer computes with.
    for side in (packed, w, qdq(w, RCEIL)):
        served = {linear: qdq(w, RCEIL).bfloat16()}
        assert statuses(served, {linear: side}, targets="linears") == {linear: "equal"}
    served = {linear: w.bfloat16()}
    assert statuses(served, {linear: w}, targets="linears") == {linear: "not packed"}
    options = {"targets": "linears", "exclude": (linear,)}
    assert statuses(served, {linear: w}, **options) == {linear: "equal"}
    assert statuses({"i": norm.to(torch.int64)}, {"i": norm}) == {"i": "not compared"}
    unquantised = only({NAME: pack(w, RCEIL)}, {NAME: w.t().contiguous()})
    assert unquantised.status == "differs" and unquantised.cause.endswith("transposed")


def test_damage_is_found_with_and_without_a_trainer():
    packed = pack(weight(), RCEIL)
    packed.scales[0, 0] = 255
    found = only({NAME: packed}, {NAME: weight()})
    assert (found.status, found.scales_differ) == ("damaged", 1)
    assert [r.status for r in check_packed(ModelWeights({NAME: packed}))] == ["damaged"]
    assert all(r.passed for r in check_packed(ModelWeights({NAME: pack(weight(), RCEIL)})))


@pytest.mark.parametrize("rule", ScaleRule, ids=lambda rule: rule.value)
def test_an_alternative_that_differs_in_nothing_is_the_codec(rule):
    settings = QuantSettings(scale_rule=rule)
    for seed in range(3):
        w = weight(seed=seed) * 2.0 ** (seed * 30 - 30)
        w[5:7, :32] = 0
        assert torch.equal(Alternative(rule).qdq(w), qdq(w, settings))
        lower, upper = neighbours(w, settings)
        values = qdq(w, settings)
        assert bool(((values == lower) | (values == upper)).all())
        assert bool((lower.abs() <= upper.abs()).all())
    found = [one.difference(settings) for one in alternatives(settings, square=True)]
    assert len(found) == len(set(found)) == 5 * 3 * 2 * 2 * 2 - 1
    assert all(found) and ", " not in found[0] and found[-1].count(", ") >= 3


def test_stochastic_rounding_is_unbiased():
    x = torch.full((400, 32), 1.125)
    x[:, 0] = 6
    values = Alternative(ScaleRule.RCEIL, "stochastic").qdq(x, torch.Generator().manual_seed(0))
    assert set(values[:, 1:].unique().tolist()) == {1.0, 1.5}
    assert abs(float(values[:, 1:].mean()) - 1.125) < 0.01
