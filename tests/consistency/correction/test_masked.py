import math
from typing import Any

import pytest
import torch

from consistency.correction import divergence_mask, off_policy_sequence_mask, ratio_mask
from consistency.errors import InvalidInputError
from consistency.estimators import k3


def log(values):
    return torch.tensor(values, dtype=torch.float64).log()


OLD = log([[0.4, 0.25, 0.1], [0.6, 0.4, 1.0]])
ROLL = log([[0.5, 0.25, 0.05], [0.6, 0.1, 1.0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


def from_ratios(ratios):
    """lp_old and lp_roll whose ratio is the given one."""
    old = log(ratios)
    return old, torch.zeros_like(old)


def kept(correction):
    return correction.mask.int().tolist()


def test_worked_example_of_the_token_mask():
    # 2.0 lies on the limit: allow for the rounding of .1 / .05.
    found = ratio_mask(OLD, ROLL, MASK, low=0.5 - 1e-9, high=2.0 + 1e-9)
    assert kept(found) == [[1, 1, 1], [1, 0, 0]]
    assert found.masked_fraction == pytest.approx(1 / 5)
    assert torch.allclose(found.weight, torch.tensor([[0.8, 1, 2], [1, 0, 0]]).double())


def test_worked_example_of_the_geometric_mask():
    found = ratio_mask(OLD, ROLL, MASK, level="geometric", low=0.999, high=1.001)
    assert kept(found) == [[0, 0, 0], [0, 0, 0]]
    assert found.masked_fraction == 1.0


def test_worked_example_of_a_long_mean_near_one():
    pair = from_ratios([[0.9, 1.1, 1.0, 1.01]])
    sequence = ratio_mask(*pair, level="sequence")
    geometric = ratio_mask(*pair, level="geometric", low=0.999, high=1.001)
    assert sequence.weight[0, 0].item() == pytest.approx(0.9999)
    assert geometric.weight[0, 0].item() == pytest.approx(0.9999750)
    assert kept(geometric) == [[1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("ratio", "keep"), [(0.9965, True), (1.002, False), (0.9985, True), (1.0035, False)]
)
def test_limits_are_on_r_and_not_on_one_over_r(ratio, keep):
    found = ratio_mask(*from_ratios([[ratio] * 4]), level="geometric", low=0.996, high=1.001)
    assert bool(found.mask.all()) is keep
    assert bool(found.mask.any()) is keep


@pytest.mark.parametrize(
    ("ratios", "k1_sum", "keep"),
    [([1.1, 1.2, 1.3], -0.539996, True), ([2, 2, 1], -1.386294, False)],
)
def test_worked_example_of_the_sequence_sum_of_k1(ratios, k1_sum, keep):
    old, roll = from_ratios([ratios])
    assert (roll - old).sum().item() == pytest.approx(k1_sum, abs=1e-6)
    assert bool(ratio_mask(old, roll, level="sequence", low=0.5, high=2.0).mask.all()) is keep


def test_worked_example_of_k3_and_of_its_other_direction():
    assert k3(log([1.1])).item() == pytest.approx(0.004690, abs=1e-6)
    assert k3(-log([1.1])).item() == pytest.approx(0.004401, abs=1e-6)
    assert k3(log([1.2])).item() == pytest.approx(0.017678, abs=1e-6)
    found = divergence_mask(*from_ratios([[1.1, 1.2]]), estimator="k3", limit=0.01)
    assert kept(found) == [[1, 0]]
    assert torch.equal(found.weight, torch.tensor([[1.0, 0.0]]).double())


@pytest.mark.parametrize(
    ("level", "keep"),
    [("sequence_sum", [0, 1]), ("sequence_mean", [1, 1]), ("sequence_max", [0, 1])],
)
def test_divergence_masks_per_sequence(level, keep):
    # k3 of 1.2 is .0177: the sum and the maximum of row 0 exceed .015, its mean does not.
    pair = from_ratios([[1.2, 1.0], [1.1, 1.0]])
    found = divergence_mask(*pair, level=level, limit=0.015)
    assert [bool(row.all()) for row in found.mask] == [bool(flag) for flag in keep]


def test_k2_masks_by_half_the_squared_log_ratio():
    limit = math.log(1.5) ** 2 / 2
    found = divergence_mask(*from_ratios([[1.4, 1.6, 1 / 1.6]]), estimator="k2", limit=limit)
    assert kept(found) == [[1, 0, 0]]


def test_worked_example_of_the_veto():
    pair = from_ratios([[1.0, 5e-5, 2.0], [1.0, 1.0, 1.0]])
    found = ratio_mask(*pair, low=0.0, high=math.inf, veto=1e-4)
    assert kept(found) == [[0, 0, 0], [1, 1, 1]]


def test_the_veto_sees_raw_ratios_and_ignores_masked_tokens():
    old, roll = torch.tensor([[-30.0, -1.0]]), torch.tensor([[-1.0, -1.0]])
    everything: dict[str, Any] = {"low": 0.0, "high": math.inf}
    assert kept(ratio_mask(old, roll, veto=1e-10, **everything)) == [[0, 0]]
    mask = torch.tensor([[0, 1]])
    assert kept(ratio_mask(old, roll, mask, veto=1e-10, **everything)) == [[0, 1]]


def test_worked_example_of_the_off_policy_sequence_mask():
    lp = torch.full((3, 2), -1.0)
    lp_old = lp + torch.tensor([[0.5], [0.5], [-0.1]])
    found = off_policy_sequence_mask(lp, lp_old, torch.tensor([1.0, -1.0, -1.0]))
    assert kept(found) == [[1, 1], [0, 0], [1, 1]]


def test_ends_of_an_interval_are_kept_in_fp32_too():
    old = torch.tensor([[0.5, 2.0, 3.0, 5.0]]).log()
    for low, high, expected in ((0.5, 5.0, [1, 1, 1, 1]), (2.0, 3.0, [0, 1, 1, 0])):
        assert kept(ratio_mask(old, torch.zeros_like(old), low=low, high=high)) == [expected]


def test_plain_rejection_has_weight_one():
    found = ratio_mask(OLD, ROLL, MASK, low=0.5, high=3.0, weighted=False)
    assert torch.equal(found.weight, found.mask.double())


def test_an_empty_sequence_is_no_reason_for_nan():
    mask = torch.tensor([[1, 1, 1], [0, 0, 0]])
    for level in ("token", "sequence", "geometric"):
        found = ratio_mask(OLD, ROLL, mask, level=level, veto=1e-4)
        assert torch.isfinite(found.weight).all()
        assert kept(found)[1] == [0, 0, 0]


def test_masks_combine():
    low = ratio_mask(OLD, ROLL, MASK, low=0.9, high=10.0)
    high = ratio_mask(OLD, ROLL, MASK, low=0.0, high=1.5, weighted=False)
    both = low.combine(high)
    assert kept(both) == [[0, 1, 0], [1, 0, 0]]
    assert both.masked_fraction == pytest.approx(3 / 5)
    assert torch.allclose(both.weight, torch.tensor([[0, 1.0, 0], [1, 0, 0]]).double())


def test_corrections_of_different_batches_do_not_combine():
    one = ratio_mask(OLD, ROLL, MASK)
    with pytest.raises(InvalidInputError, match="combine"):
        one.combine(ratio_mask(OLD, ROLL))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"low": 2.0, "high": 0.5}, "low"),
        ({"low": -0.1}, "low"),
        ({"high": float("nan")}, "high"),
        ({"level": "batch"}, "level"),
        ({"veto": 0.0}, "veto"),
    ],
)
def test_limits_that_do_not_fit_raise(arguments, message):
    with pytest.raises(InvalidInputError, match=message):
        ratio_mask(OLD, ROLL, MASK, **arguments)


def test_advantages_per_token_are_refused_where_one_per_sequence_is_meant():
    with pytest.raises(InvalidInputError, match="advantages"):
        off_policy_sequence_mask(OLD, ROLL, torch.ones(2, 3))
