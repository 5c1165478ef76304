import math

import pytest
import torch

from consistency.correction import (
    aggregate,
    icepop,
    policy_loss,
    ratio_mask,
    sequence_tis,
    token_tis,
)
from consistency.errors import InvalidInputError


def log(values):
    return torch.tensor(values, dtype=torch.float64).log()


def losses(ratios, advantage, **limits):
    lp = log([ratios])
    advantages = torch.tensor([advantage], dtype=torch.float64)
    return policy_loss(lp, torch.zeros_like(lp), advantages, **limits).per_token[0]


def close(found, expected):
    return torch.allclose(found, torch.tensor(expected, dtype=found.dtype), atol=1e-9)


def test_worked_example_of_decoupled_ppo():
    lp, old, roll = log([[0.30, 0.20]]), log([[0.25, 0.25]]), log([[0.5, 0.1]])
    advantages = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    correction = token_tis(old, roll, limit=2.0)
    assert close(correction.weight, [[0.5, 2.0]])
    # rho lies on the limits 1.2 and .8: clipped or not, the value is the same.
    loss = policy_loss(lp, old, advantages, correction=correction).per_token
    assert close(loss, [[-0.6, 1.6]])
    assert aggregate(loss, torch.ones(1, 2)).item() == pytest.approx(0.5)
    coupled = policy_loss(lp, roll, advantages).per_token
    assert close(coupled, [[-0.6, 2.0]])


def test_worked_example_of_the_dual_clip():
    found = losses([0.5, 1.0, 4.0], -1.0, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    assert close(found, [0.8, 1.0, 3.0])


def test_the_dual_clip_leaves_positive_advantages_alone():
    limits = {"clip_low": 0.2, "clip_high": 0.28}
    ratios = [0.5, 1.0, 4.0]
    assert torch.equal(losses(ratios, 1.0, dual_clip=3.0, **limits), losses(ratios, 1.0, **limits))


@pytest.mark.parametrize(
    ("advantage", "objective"),
    [(1.0, [0.5, 0.9, 1.1, 1.25, 1.28]), (-1.0, [-0.8, -0.9, -1.1, -1.25, -1.5])],
)
def test_worked_example_of_clip_higher(advantage, objective):
    found = losses([0.5, 0.9, 1.1, 1.25, 1.5], advantage, clip_low=0.2, clip_high=0.28)
    assert close(-found, objective)


def test_worked_example_of_gspo():
    limits = {"clip_low": 3e-4, "clip_high": 4e-4, "ratio": "gspo"}
    for log_ratios, advantage, objective, gradient in (
        ([0.002, -0.001, 0.0005], 1.0, 1.0004, 0.0),
        ([0.002, -0.001, 0.0005], -1.0, -1.00050013, -1.00050013 / 3),
        ([0.0006, -0.0003, 0.0003], 1.0, 1.00020002, 0.33340),
    ):
        lp = torch.tensor([log_ratios], dtype=torch.float64, requires_grad=True)
        old = torch.zeros(1, 3, dtype=torch.float64)
        policy = policy_loss(lp, old, torch.tensor([advantage]), **limits)
        loss = aggregate(policy.per_token, torch.ones(1, 3), "seq-mean-token-mean")
        loss.backward()
        assert -loss.item() == pytest.approx(objective, abs=1e-8)
        assert lp.grad is not None
        assert torch.allclose(-lp.grad, torch.full_like(lp, gradient), atol=1e-5)


def test_clip_fractions_count_tokens_of_the_mask_whose_gradient_is_gone():
    lp = log([[1.5, 1.5, 0.5, 9.0]])
    advantages = torch.tensor([[1.0, -1.0, 1.0, 1.0]])
    mask = torch.tensor([[1, 1, 1, 0]])
    found = policy_loss(lp, torch.zeros_like(lp), advantages, mask)
    assert found.clip_fraction == pytest.approx(1 / 3)
    assert found.dual_clip_fraction == 0.0


def test_a_token_inside_the_clip_range_keeps_its_whole_gradient():
    # min() of two equal numbers hands each half of the gradient; together that must be all of it.
    lp = log([[1.1]]).requires_grad_()
    policy_loss(lp, torch.zeros(1, 1).double(), torch.tensor([1.0])).per_token.sum().backward()
    assert lp.grad is not None and lp.grad.item() == pytest.approx(-1.1)


def test_on_policy_every_correction_leaves_plain_reinforce():
    torch.manual_seed(0)
    lp = torch.randn(3, 5, dtype=torch.float64).abs().neg().requires_grad_()
    base = lp.detach()
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 1, 1, 0]])
    advantages = torch.tensor([1.5, -0.5, 0.25], dtype=torch.float64)
    reinforce = aggregate(-advantages[:, None] * lp, mask)
    (expected,) = torch.autograd.grad(reinforce, lp)
    for correction in (
        None,
        token_tis(base, base, mask),
        sequence_tis(base, base, mask, normalise=True),
        ratio_mask(base, base, mask, level="geometric"),
        icepop(base, base, mask),
    ):
        if correction is not None:
            assert torch.equal(correction.mask, mask.bool())
            assert torch.equal(correction.weight, mask.double())
        policy = policy_loss(lp, base, advantages, mask, correction=correction)
        (found,) = torch.autograd.grad(aggregate(policy.per_token, mask), lp)
        assert torch.allclose(found, expected)
        assert policy.clip_fraction == 0.0


def test_on_policy_gspo_leaves_reinforce_under_its_own_aggregation():
    lp = torch.full((2, 3), -1.0, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    advantages = torch.tensor([1.0, -2.0], dtype=torch.float64)
    mode = "seq-mean-token-mean"
    (expected,) = torch.autograd.grad(aggregate(-advantages[:, None] * lp, mask, mode), lp)
    policy = policy_loss(lp, lp.detach(), advantages, mask, ratio="gspo")
    (found,) = torch.autograd.grad(aggregate(policy.per_token, mask, mode), lp)
    assert torch.allclose(found, expected)


def test_the_correction_weighs_outside_the_clip():
    # rho = 2 is clipped to 1.2; the weight .5 must scale the clipped value, not bring rho inside.
    lp, old, roll = log([[0.8]]), log([[0.4]]), log([[0.8]])
    correction = token_tis(old, roll)
    loss = policy_loss(lp, old, torch.tensor([1.0]), correction=correction).per_token
    assert close(loss, [[-0.6]])


def test_packed_and_padded_batches_agree():
    padded = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -0.25, -9.0]], requires_grad=True)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    advantages = torch.tensor([1.0, -1.0])
    expected = policy_loss(padded, padded.detach() - 0.1, advantages, mask).per_token[mask.bool()]
    packed = padded.detach()[mask.bool()]
    found = policy_loss(
        packed, packed - 0.1, advantages, cu_seqlens=torch.tensor([0, 3, 5])
    ).per_token
    assert torch.equal(found, expected)


def test_advantages_carry_no_gradient():
    advantages = torch.tensor([1.0], requires_grad=True)
    lp = torch.zeros(1, 2, requires_grad=True)
    policy_loss(lp, lp, advantages).per_token.sum().backward()
    assert advantages.grad is None
    assert lp.grad is not None and torch.equal(lp.grad, torch.full((1, 2), -1.0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"advantages": torch.ones(2)}, "advantages"),
        ({"advantages": torch.tensor([math.nan])}, "advantages"),
        ({"clip_low": -0.1}, "clip_low"),
        ({"clip_high": math.nan}, "clip_high"),
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"ratio": "sequence"}, "ratio"),
        ({"lp_old": torch.full((1, 3), -math.inf)}, "lp_old"),
        ({"correction": token_tis(torch.zeros(1, 2), torch.zeros(1, 2))}, "correction"),
    ],
)
def test_arguments_that_do_not_fit_raise(arguments, message):
    base = {"lp": torch.zeros(1, 3), "lp_old": torch.zeros(1, 3), "advantages": torch.ones(1)}
    with pytest.raises(InvalidInputError, match=message):
        policy_loss(**{**base, **arguments})
