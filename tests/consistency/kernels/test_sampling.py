from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.kernels import gumbel_noise, sample


def draw(logits, temperature, seeds, positions):
    return sample(logits, temperature=temperature, seeds=seeds, positions=positions)


def keys_of(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    temperature = torch.rand(rows, generator=generator) * 2
    temperature[::4] = 0.0
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    positions = torch.randint(0, 2**40, (rows,), generator=generator)
    return temperature, seeds, positions


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 300), st.integers(0, 10**6), st.data())
def test_a_rows_token_does_not_depend_on_its_batch_or_its_place_in_it(
    wide, rows, width, seed, data
):
    logits, keys = wide(seed, rows, width), keys_of(rows, seed)
    whole = draw(logits, *keys)
    picked = data.draw(st.lists(st.integers(0, rows - 1), max_size=40))
    assert torch.equal(draw(logits[picked], *(key[picked] for key in keys)), whole[picked])


def test_threads_and_strides_change_nothing_at_a_real_vocabulary(wide, threads):
    logits, keys = wide(0, 8, 49152), keys_of(8)
    with threads(1):
        expected = draw(logits, *keys)
    with threads(2):
        assert torch.equal(draw(logits, *keys), expected)
    assert torch.equal(draw(logits.t().contiguous().t(), *keys), expected)
    assert torch.equal(draw(logits, *(key.repeat_interleave(2)[::2] for key in keys)), expected)


def test_the_rule_is_the_argmax_of_scaled_logits_and_noise(wide):
    logits = wide(0, 20, 130)
    temperature, seeds, positions = keys_of(20)
    temperature = temperature + 0.1
    tokens = draw(logits, temperature, seeds, positions)
    for row in range(20):
        noise = gumbel_noise(int(seeds[row]), int(positions[row]), 130).double()
        scaled = (logits[row] - logits[row].max()).double() / temperature[row].double()
        assert int(tokens[row]) == int((scaled + noise).argmax())


def test_temperature_zero_takes_the_lowest_index_of_the_largest_logit():
    logits = torch.zeros(3, 100)
    logits[0, [17, 40]] = 1.0
    logits[2, 99] = 1.0
    tokens = draw(logits, torch.zeros(3), torch.arange(3), torch.arange(3))
    assert tokens.tolist() == [17, 0, 99]


def test_tokens_follow_the_softmax_of_logits_over_temperature():
    draws, logits = 20000, torch.tensor([1.0, 0.0, -1.0, 2.0, -torch.inf])
    tokens = draw(
        logits.expand(draws, -1),
        torch.full((draws,), 0.7),
        torch.arange(draws) // 100,
        torch.arange(draws) % 100,
    )
    expected = (logits / 0.7).softmax(0)
    share = tokens.bincount(minlength=5) / draws
    deviation = (expected * (1 - expected) / draws).sqrt()
    assert ((share - expected).abs() <= 4 * deviation).all()


def test_noise_is_that_of_the_gumbel_distribution_and_depends_on_seed_and_position():
    noise = gumbel_noise(1, 2, 100000)
    assert abs(float(noise.mean()) - 0.5772) < 0.02
    assert abs(float(noise.var()) - 1.6449) < 0.05
    assert torch.equal(gumbel_noise(1, 2, 70), noise[:70])
    assert not torch.equal(gumbel_noise(2, 2, 70), noise[:70])
    assert not torch.equal(gumbel_noise(1, 3, 70), noise[:70])
    assert not torch.equal(gumbel_noise(1, 2 + 2**32, 70), noise[:70])


def test_a_logit_of_infinity_is_always_sampled_and_one_of_minus_infinity_never():
    logits = torch.full((64, 9), -torch.inf)
    logits[:32, 4] = 0.0
    logits[32:] = 5.0
    logits[32:, 7] = torch.inf
    tokens = draw(logits, torch.ones(64), torch.arange(64), torch.zeros(64, dtype=torch.int64))
    assert tokens.tolist() == [4] * 32 + [7] * 32


def test_no_rows_give_no_tokens():
    none = torch.zeros(0, dtype=torch.int64)
    assert draw(torch.zeros(0, 5), torch.zeros(0), none, none).shape == (0,)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": torch.tensor([[0.0, 1.0], [torch.nan, 0.0]])}, InvalidInputError, r"logits\[1"),
        (
            {"logits": torch.full((2, 2), -torch.inf)},
            InvalidInputError,
            r"logits\[0\] has no entry",
        ),
        ({"logits": torch.zeros(2, 0)}, InvalidInputError, "at least one column"),
        ({"logits": torch.zeros(2, 2).half()}, UnsupportedError, "logits must be float32"),
        (
            {"temperature": torch.tensor([1.0, -1.0])},
            InvalidInputError,
            r"temperature\[1\] must be",
        ),
        ({"temperature": torch.tensor([torch.inf, 1.0])}, InvalidInputError, r"temperature\[0\]"),
        ({"temperature": torch.ones(3)}, InvalidInputError, r"temperature must have shape \(2,\)"),
        ({"seeds": torch.zeros(2)}, UnsupportedError, "seeds"),
        ({"positions": torch.zeros(2, dtype=torch.int32)}, UnsupportedError, "positions"),
    ],
)
def test_bad_arguments_are_named(change, error, message):
    good = {"logits": torch.zeros(2, 2), "temperature": torch.ones(2)}
    good |= {"seeds": torch.zeros(2, dtype=torch.int64), "positions": torch.arange(2)}
    with pytest.raises(error, match=message):
        draw(**(good | change))


def test_a_negative_width_is_refused():
    with pytest.raises(InvalidInputError, match="width must be 0 or more, got -1"):
        gumbel_noise(0, 0, -1)
