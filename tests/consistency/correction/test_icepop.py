import math

import pytest
import torch

from consistency.correction import aggregate, icepop, policy_loss
from consistency.errors import InvalidInputError

K = torch.tensor([[0.4, 0.5, 1.2, 5.0, 6.0]], dtype=torch.float64)
R = torch.tensor([[1.0, 1.1, 1.3, 0.7, 1.0]], dtype=torch.float64)


def logprobs():
    """lp, lp_old, lp_roll with the mismatch K and the staleness R of the worked example."""
    roll = torch.zeros_like(K)
    old = K.log()
    return (old + R.log()).requires_grad_(), old, roll


def test_worked_example_of_the_mask():
    _, old, roll = logprobs()
    found = icepop(old, roll)
    expected = torch.tensor([[0, 0.5, 1.2, 5.0, 0]], dtype=torch.float64)
    assert torch.allclose(found.weight, expected)
    assert found.mask.tolist() == [[False, True, True, True, False]]
    assert found.masked_fraction == pytest.approx(2 / 5)
    narrow = icepop(old, roll, low=0.5, high=2.0)
    assert torch.allclose(narrow.weight, torch.tensor([[0, 0.5, 1.2, 0, 0]], dtype=torch.float64))


@pytest.mark.parametrize(
    ("advantage", "objective", "gradient"),
    [(1.0, 1.098, [0, 0.11, 0, 0.7, 0]), (-1.0, -1.222, [0, -0.11, -0.312, 0, 0])],
)
def test_worked_example_of_objective_and_gradient(advantage, objective, gradient):
    lp, old, roll = logprobs()
    correction = icepop(old, roll)
    policy = policy_loss(lp, old, torch.tensor([advantage]), correction=correction)
    loss = aggregate(
        policy.per_token, torch.ones_like(lp), "seq-mean-token-mean", kept=correction.mask
    )
    loss.backward()
    assert -loss.item() == pytest.approx(objective, abs=1e-9)
    assert lp.grad is not None
    assert torch.allclose(-lp.grad, torch.tensor([gradient], dtype=torch.float64), atol=1e-9)


def test_limits_are_inclusive_in_fp32():
    old = torch.tensor([0.5, 5.0]).log()
    assert icepop(old, torch.zeros(2)).mask.all()


def test_dropping_everything_gives_loss_zero_with_a_graph():
    lp, old, roll = logprobs()
    correction = icepop(old, roll + 9.0)
    assert correction.masked_fraction == 1.0
    loss = aggregate(
        policy_loss(lp, old, torch.tensor([1.0]), correction=correction).per_token,
        torch.ones_like(lp),
        kept=correction.mask,
        denominator="kept",
    )
    loss.backward()
    assert loss.item() == 0.0
    assert lp.grad is not None and torch.equal(lp.grad, torch.zeros_like(lp))


def test_without_limits_icepop_is_uncapped_decoupled_ppo():
    lp, old, roll = logprobs()
    unlimited = icepop(old, roll, low=0.0, high=math.inf)
    assert torch.equal(unlimited.weight, (old - roll).exp())
    assert unlimited.masked_fraction == 0.0
    loss = policy_loss(lp, old, torch.tensor([1.0]), correction=unlimited).per_token
    bare = policy_loss(lp, old, torch.tensor([1.0])).per_token
    assert torch.allclose(loss, bare * K)


def test_a_huge_ratio_does_not_become_nan_through_a_zero_weight():
    old = torch.tensor([[-1.0, -1.0]])
    correction = icepop(old, torch.tensor([[-200.0, -1.0]]))
    lp = torch.tensor([[300.0, -1.0]], requires_grad=True)
    policy_loss(lp, old, torch.tensor([-1.0]), correction=correction).per_token.sum().backward()
    assert lp.grad is not None and torch.isfinite(lp.grad).all()


def test_limits_in_the_wrong_order_raise():
    with pytest.raises(InvalidInputError, match="low"):
        icepop(K, K, low=5.0, high=0.5)
