import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.errors import InvalidInputError
from consistency.estimators import k1, k2, k3
from consistency.metrics import (
    categorical_divergence,
    categorical_kl,
    mismatch_metrics,
    reference_divergence,
)


def log(values):
    return torch.tensor(values, dtype=torch.float64).log()


TRAIN = log([[0.5, 0.4, 0.2], [0.9, 0.3, 1.0]])
ROLL = log([[0.5, 0.5, 0.1], [0.8, 0.3, 1.0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


def test_worked_example_of_the_mismatch_metrics():
    found = mismatch_metrics(TRAIN, ROLL, MASK, ess_limit=2.0)
    expected = {
        "k1_kl": -0.117557,
        "k2_kl": 0.054412,
        "k3_kl": 0.067443,
        "chi2_token": 0.581125,
        "chi2_sequence": 0.9128125,
        "train_ppl": (2.924018 + 1.924501) / 2,
        "rollout_ppl": (3.419952 + 2.041241) / 2,
        "log_ppl_diff": (-0.156668 - 0.058892) / 2,
        "log_ppl_diff_abs": 0.107780,
        "log_ppl_diff_max": -0.058892,
        "log_ppl_diff_min": -0.156668,
        "ppl_ratio": 0.898899,
        "probs_diff_mean": 0.06,
        "probs_diff_max": 0.1,
        "probs_diff_std": 0.054772,
        "probs_pearson": 0.950953,
        "ess": 0.888118,
        "exact_fraction": 0.4,
        "max_abs_diff": math.log(2.0),
        "mean_abs_diff": (math.log(1.25) + math.log(2.0) + math.log(1.125)) / 5,
    }
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value, abs=1e-6), name
    assert (found.tokens, found.sequences, found.valid) == (5, 2, True)


def test_perplexities_per_row_of_the_worked_example():
    for row, train_ppl, rollout_ppl in ((0, 2.924018, 3.419952), (1, 1.924501, 2.041241)):
        found = mismatch_metrics(TRAIN[row], ROLL[row], MASK[row])
        assert found.train_ppl == pytest.approx(train_ppl, abs=1e-6)
        assert found.rollout_ppl == pytest.approx(rollout_ppl, abs=1e-6)


def test_a_packed_batch_gives_the_numbers_of_the_padded_one():
    packed = mismatch_metrics(
        torch.cat([TRAIN[0], TRAIN[1, :2]]),
        torch.cat([ROLL[0], ROLL[1, :2]]),
        cu_seqlens=torch.tensor([0, 3, 5], dtype=torch.int32),
    )
    assert packed == mismatch_metrics(TRAIN, ROLL, MASK)


def test_worked_example_of_the_categorical_expectations():
    log_p, log_q = log([0.5, 0.3, 0.2]), log([0.4, 0.4, 0.2])
    exact = categorical_divergence(log_p, log_q)
    log_ratio = log_q - log_p
    for value in (
        exact.kl,
        (log_p.exp() * k1(log_ratio)).sum(),
        (log_p.exp() * k3(log_ratio)).sum(),
    ):
        assert float(value) == pytest.approx(0.0252672, abs=1e-7)
    assert float(exact.k2) == pytest.approx(0.0248624, abs=1e-7)
    assert float((log_p.exp() * k2(log_ratio)).sum()) == pytest.approx(0.0248624, abs=1e-7)
    assert float(exact.chi2) == pytest.approx(0.0533333, abs=1e-7)
    assert torch.equal(categorical_kl(log_p, log_q), exact.kl)


def test_worked_example_against_a_reference():
    found = reference_divergence(log([0.5]), log([0.25]))
    assert found.k1_kl == pytest.approx(0.693147, abs=1e-6)
    assert found.k2_kl == pytest.approx(0.240227, abs=1e-6)
    assert found.k3_kl == pytest.approx(0.193147, abs=1e-6)
    assert (found.tokens, found.valid) == (1, True)


def test_the_direction_of_k1_is_kl_from_rollout_to_train():
    # The rollout policy samples token 0 with .9; the learner gives it less, so KL(roll||train) > 0.
    found = mismatch_metrics(log([0.5]), log([0.9]))
    assert found.k1_kl == pytest.approx(math.log(0.9 / 0.5))


def test_a_probability_of_zero_contributes_nothing_to_a_categorical_kl():
    log_p = torch.tensor([0.0, -torch.inf])
    found = categorical_divergence(log_p, log([0.5, 0.5]).to(torch.float32))
    assert float(found.kl) == pytest.approx(math.log(2), abs=1e-6)
    assert float(found.chi2) == pytest.approx(-0.75, abs=1e-6)
    assert float(categorical_kl(log([0.5, 0.5]).to(torch.float32), log_p)) == math.inf


def test_a_row_that_is_no_distribution_raises():
    with pytest.raises(InvalidInputError, match="log_q"):
        categorical_kl(log([0.5, 0.5]), log([0.5, 0.4]))


def test_an_empty_mask_gives_zeros_and_says_so():
    found = mismatch_metrics(TRAIN, ROLL, torch.zeros(2, 3))
    assert not found.valid
    assert set(found.as_dict().values()) == {0.0}
    reference = reference_divergence(TRAIN, ROLL, torch.zeros(2, 3))
    assert (reference.k3_kl, reference.valid) == (0.0, False)


def test_a_single_token_has_no_spread_and_no_nan():
    found = mismatch_metrics(log([0.5]), log([0.25]))
    assert found.probs_diff_std == 0.0
    assert found.probs_pearson == 0.0
    assert all(math.isfinite(value) for value in found.as_dict().values())


def test_equal_policies_do_not_diverge():
    found = mismatch_metrics(TRAIN, TRAIN, MASK)
    for name in ("k1_kl", "k2_kl", "k3_kl", "chi2_token", "chi2_sequence", "max_abs_diff"):
        assert getattr(found, name) == 0.0, name
    for name in ("ess", "exact_fraction", "ppl_ratio", "probs_pearson"):
        assert getattr(found, name) == pytest.approx(1.0), name


def test_one_fp32_bit_of_drift_is_seen():
    roll = torch.full((4,), -1.5)
    train = roll.clone()
    train[2] = torch.nextafter(train[2], torch.tensor(0.0))
    found = mismatch_metrics(train, roll)
    assert found.exact_fraction == 0.75
    assert found.max_abs_diff > 0
    assert found.k3_kl > 0


@pytest.mark.parametrize("missing", [float("nan"), float("-inf"), float("inf")])
@pytest.mark.parametrize("side", ["lp_train", "lp_roll"])
def test_a_missing_logprob_raises_and_is_never_taken_for_probability_one(side, missing):
    values = {"lp_train": TRAIN.clone(), "lp_roll": ROLL.clone()}
    values[side][1, 1] = missing
    with pytest.raises(InvalidInputError, match=rf"{side}\[1, 1\]"):
        mismatch_metrics(values["lp_train"], values["lp_roll"], MASK)


def test_what_the_mask_hides_may_be_missing():
    train, roll = TRAIN.clone(), ROLL.clone()
    train[1, 2], roll[1, 2] = float("nan"), float("-inf")
    assert mismatch_metrics(train, roll, MASK) == mismatch_metrics(TRAIN, ROLL, MASK)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lp_roll": ROLL[:, :2]}, "lp_roll"),
        ({"mask": MASK[:1]}, "mask"),
        ({"mask": MASK * 2}, "other than 0 and 1"),
        ({"lp_roll": MASK}, "dtype"),
        ({"cu_seqlens": torch.tensor([0, 6])}, "packed"),
        ({"ess_limit": 0.5}, "ess_limit"),
    ],
)
def test_arguments_that_do_not_fit_raise(arguments, message):
    with pytest.raises(InvalidInputError, match=message):
        mismatch_metrics(**{"lp_train": TRAIN, "lp_roll": ROLL, "mask": MASK, **arguments})


@pytest.mark.parametrize("bounds", [[1, 3], [0, 2], [0, 2, 1, 3], [[0, 3]], []])
def test_sequence_bounds_that_do_not_fit_raise(bounds):
    with pytest.raises(InvalidInputError, match="cu_seqlens"):
        mismatch_metrics(TRAIN[0], ROLL[0], cu_seqlens=torch.tensor(bounds, dtype=torch.int64))


def test_extreme_drift_stays_finite():
    found = mismatch_metrics(torch.full((3,), -300.0), torch.full((3,), -1.0))
    assert found.max_abs_diff == 299.0
    assert all(math.isfinite(value) for value in found.as_dict().values())


logprobs = st.lists(st.floats(-12.0, 0.0, width=32), min_size=1, max_size=24)


@settings(max_examples=40, deadline=None)
@given(st.data(), logprobs)
def test_bounds_that_hold_for_every_batch(data, train):
    roll = data.draw(
        st.lists(st.floats(-12.0, 0.0, width=32), min_size=len(train), max_size=len(train))
    )
    found = mismatch_metrics(torch.tensor(train), torch.tensor(roll))
    assert 0 < found.ess <= 1 + 1e-12
    assert found.k3_kl >= 0
    assert found.k2_kl >= 0
    assert -1 <= found.probs_pearson <= 1
    assert found.mean_abs_diff <= found.max_abs_diff + 1e-12


@settings(max_examples=30, deadline=None)
@given(logprobs, st.integers(0, 7))
def test_padding_changes_nothing(train, padding):
    lp_train = torch.tensor([train])
    lp_roll = lp_train * 0.9
    mask = torch.ones_like(lp_train)
    filler = torch.full((1, padding), float("nan"))
    padded = mismatch_metrics(
        torch.cat([lp_train, filler], 1),
        torch.cat([lp_roll, filler], 1),
        torch.cat([mask, torch.zeros(1, padding)], 1),
    )
    assert padded == mismatch_metrics(lp_train, lp_roll, mask)
