import pytest
import torch

from consistency.correction import sequence_tis, token_tis
from consistency.errors import InvalidInputError


def log(values):
    return torch.tensor(values, dtype=torch.float64).log()


OLD = log([[0.4, 0.25, 0.1], [0.6, 0.4, 1.0]])
ROLL = log([[0.5, 0.25, 0.05], [0.6, 0.1, 1.0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


def close(found, expected):
    return torch.allclose(found, torch.tensor(expected, dtype=found.dtype), atol=1e-6)


def test_worked_example_of_token_tis():
    found = token_tis(OLD, ROLL, MASK, limit=2.0)
    assert close(found.weight, [[0.8, 1, 2], [1, 2, 0]])
    assert torch.equal(found.mask, MASK.bool())
    assert found.masked_fraction == 0.0


def test_worked_example_of_sequence_tis():
    found = sequence_tis(OLD, ROLL, MASK, limit=2.0)
    assert close(found.weight, [[1.6, 1.6, 1.6], [2.0, 2.0, 0.0]])
    assert found.truncated_fraction == pytest.approx(2 / 5)


def test_worked_example_of_token_normalised_tis():
    found = token_tis(OLD, ROLL, MASK, limit=2.0, normalise=True)
    assert close(found.weight, [[0.588235, 0.735294, 1.470588], [0.735294, 1.470588, 0]])


def test_worked_example_of_sequence_normalised_tis():
    found = sequence_tis(OLD, ROLL, MASK, limit=2.0, normalise=True)
    assert close(found.weight, [[0.888889] * 3, [1.111111, 1.111111, 0.0]])


def test_an_empty_sequence_does_not_enter_the_mean_of_sequence_weights():
    old, roll = (torch.cat([values, torch.zeros(1, 3).double()]) for values in (OLD, ROLL))
    mask = torch.cat([MASK, torch.zeros(1, 3, dtype=torch.int64)])
    found = sequence_tis(old, roll, mask, limit=2.0, normalise=True)
    assert close(found.weight, [[0.888889] * 3, [1.111111, 1.111111, 0.0], [0.0] * 3])


def test_truncation_is_counted_on_the_tokens_of_the_mask_alone():
    found = token_tis(OLD, ROLL - torch.tensor([[0, 0, 0], [0, 0, 9.0]]), MASK, limit=2.5)
    assert found.truncated_fraction == pytest.approx(1 / 5)


def test_weights_are_detached():
    old = OLD.clone().requires_grad_()
    assert not token_tis(old, ROLL, MASK).weight.requires_grad
    assert not sequence_tis(old, ROLL, MASK).weight.requires_grad


def test_an_empty_mask_gives_zero_weights_and_no_nan():
    for rule in (token_tis, sequence_tis):
        found = rule(OLD, ROLL, torch.zeros(2, 3), normalise=True)
        assert torch.equal(found.weight, torch.zeros(2, 3, dtype=torch.float64))
        assert found.masked_fraction == 0.0
        assert set(found.statistics().values()) == {0.0}


def test_statistics_do_not_see_padding():
    statistics = token_tis(OLD, ROLL, MASK, limit=2.0).statistics()
    assert statistics["weight_token_min"] == pytest.approx(0.8)
    assert statistics["weight_token_mean"] == pytest.approx(1.36)
    spread = torch.tensor([0.8, 1, 2, 1, 2]).std().item()
    assert statistics["weight_token_std"] == pytest.approx(spread)


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan"), "2", True])
def test_a_limit_that_is_no_limit_raises(limit):
    for rule in (token_tis, sequence_tis):
        with pytest.raises(InvalidInputError, match="limit"):
            rule(OLD, ROLL, MASK, limit=limit)


@pytest.mark.parametrize("missing", [float("nan"), float("-inf")])
def test_a_missing_rollout_logprob_raises(missing):
    roll = ROLL.clone()
    roll[0, 1] = missing
    with pytest.raises(InvalidInputError, match=r"lp_roll\[0, 1\].*no log-probability"):
        token_tis(OLD, roll, MASK)
