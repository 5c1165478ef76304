"""Products with packed weights have the bits of products with the weights they stand for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency import kernels
from consistency.errors import InvalidInputError, UnsupportedError
from consistency.kernels import library, mxfp4
from consistency.quant import PackedTensor, QuantSettings, ScaleRule, pack, unpack

RCEIL = QuantSettings(scale_rule=ScaleRule.RCEIL)


def packed(wide, seed: int, *shape: int) -> PackedTensor:
    return pack(wide(seed, *shape), RCEIL)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.one_of(st.integers(0, 12), st.integers(13, 80)),
    outputs=st.one_of(st.integers(1, 70), st.sampled_from([256, 300])),
    blocks=st.one_of(st.integers(0, 9), st.sampled_from([16, 64, 70])),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    tp_invariant=st.booleans(),
    with_bias=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_a_packed_linear_is_the_linear_of_its_values(
    wide, rows, outputs, blocks, dtype, tp_invariant, with_bias, seed
):
    x = wide(seed, rows, 32 * blocks, dtype=dtype)
    weight = packed(wide, seed + 1, outputs, 32 * blocks)
    bias = wide(seed + 2, outputs) if with_bias else None
    for out_dtype in (None, torch.float32):
        expected = kernels.linear(
            x, unpack(weight), bias, out_dtype=out_dtype, tp_invariant=tp_invariant
        )
        found = kernels.mxfp4_linear(
            x,
            weight.codes,
            weight.scales,
            bias,
            out_dtype=out_dtype,
            tp_invariant=tp_invariant,
        )
        assert torch.equal(found, expected)


@settings(max_examples=30, deadline=None)
@given(
    counts=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    outputs=st.integers(1, 60),
    blocks=st.sampled_from([1, 3, 8, 16]),
    tp_invariant=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_packed_experts_are_the_experts_of_their_values(
    wide, counts, outputs, blocks, tp_invariant, seed
):
    offsets = torch.tensor([0, *counts]).cumsum(0)
    x = wide(seed, sum(counts), 32 * blocks, dtype=torch.bfloat16)
    weight = packed(wide, seed + 1, len(counts), outputs, 32 * blocks)
    expected = kernels.grouped_linear(x, unpack(weight), offsets, tp_invariant=tp_invariant)
    found = kernels.mxfp4_grouped_linear(
        x, weight.codes, weight.scales, offsets, tp_invariant=tp_invariant
    )
    assert torch.equal(found, expected)


def test_a_whole_mixture_of_experts_and_its_single_tokens(wide):
    gate_up, down = packed(wide, 0, 5, 192, 128), packed(wide, 1, 5, 128, 96)
    x = wide(2, 40, 128, dtype=torch.bfloat16)
    weights, ids = kernels.route(wide(3, 40, 5), 2, normalise=True)
    expected = kernels.moe_experts(x, unpack(gate_up), unpack(down), weights, ids)
    places = (gate_up.codes, gate_up.scales, down.codes, down.scales)
    assert torch.equal(kernels.mxfp4_moe_experts(x, *places, weights, ids), expected)
    for token in (0, 17, 39):
        one = slice(token, token + 1)
        alone = kernels.mxfp4_moe_experts(x[one], *places, weights[one], ids[one])
        assert torch.equal(alone, expected[one])


def test_instruction_sets_threads_and_strides_change_no_bit(wide, threads, monkeypatch):
    weight = packed(wide, 0, 70, 2080)
    for rows in (1, 8, 30):
        x = wide(1, rows, 2080, dtype=torch.bfloat16)
        expected = kernels.mxfp4_linear(x, weight.codes, weight.scales)
        strided = x.t().contiguous().t()
        spread = weight.codes.repeat_interleave(2, -1)[:, ::2]
        with threads(2):
            assert torch.equal(kernels.mxfp4_linear(strided, spread, weight.scales), expected)
        for variant in library.runnable_variants():
            with monkeypatch.context() as patch:
                patch.setattr(mxfp4, "_grouped", mxfp4._grouped.on(variant))
                assert torch.equal(
                    kernels.mxfp4_linear(x, weight.codes, weight.scales), expected
                ), variant


def test_packed_arguments_that_do_not_fit_are_refused(wide):
    weight = packed(wide, 0, 8, 64)
    x = wide(1, 3, 64, dtype=torch.bfloat16)
    with pytest.raises(InvalidInputError, match="last dimension of x must be 64"):
        kernels.mxfp4_linear(x[:, :32], weight.codes, weight.scales)
    with pytest.raises(InvalidInputError, match="codes must have shape"):
        kernels.mxfp4_linear(x, weight.codes[:, :16], weight.scales)
    with pytest.raises(UnsupportedError, match="codes must be uint8"):
        kernels.mxfp4_linear(x, unpack(weight), weight.scales)
    with pytest.raises(UnsupportedError, match="no gradient"):
        kernels.mxfp4_linear(x.float().requires_grad_(), weight.codes, weight.scales)
