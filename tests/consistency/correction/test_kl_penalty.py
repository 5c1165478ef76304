import math

import pytest
import torch

from consistency.correction import kl_penalty
from consistency.errors import InvalidInputError


def log(values):
    return torch.tensor(values, dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("estimator", "expected"), [("k1", 0.693147), ("k2", 0.240227), ("k3", 0.193147)]
)
def test_worked_example_against_a_reference(estimator, expected):
    found = kl_penalty(log([0.5]), log([0.25]), estimator=estimator)
    assert found.item() == pytest.approx(expected, abs=1e-6)


def test_worked_example_of_the_unbiased_form():
    found = kl_penalty(log([0.5]), log([0.25]), lp_old=log([0.4]))
    assert found.item() == pytest.approx(0.241434, abs=1e-6)


@pytest.mark.parametrize("form", ["k2", "unbiased"])
def test_the_expected_gradient_is_that_of_the_kl(form):
    # Over a whole vocabulary, the mean gradient of the penalty under p must be the KL's gradient.
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    reference = log([0.2, 0.5, 0.3])
    lp = logits.log_softmax(0)
    (expected,) = torch.autograd.grad(
        (lp.exp() * (lp - reference)).sum(), logits, retain_graph=True
    )
    if form == "k2":
        penalty = kl_penalty(lp, reference, estimator="k2")
    else:
        penalty = kl_penalty(lp, reference, lp_old=lp.detach())
    (found,) = torch.autograd.grad((lp.detach().exp() * penalty).sum(), logits)
    assert torch.allclose(found, expected)


def test_the_reference_gets_no_gradient_and_masked_tokens_none_either():
    lp = torch.tensor([[-1.0, -math.inf]], requires_grad=True)
    reference = torch.tensor([[-2.0, -1.0]], requires_grad=True)
    found = kl_penalty(lp, reference, torch.tensor([[1, 0]]))
    found.sum().backward()
    assert reference.grad is None
    assert found[0, 1].item() == 0.0
    assert lp.grad is not None and torch.isfinite(lp.grad).all()


def test_the_estimate_is_clamped():
    found = kl_penalty(torch.tensor([-30.0]), torch.tensor([-1.0]))
    assert found.item() == 10.0


def test_an_unknown_estimator_raises():
    with pytest.raises(InvalidInputError, match="estimator"):
        kl_penalty(log([0.5]), log([0.5]), estimator="k4")  # type: ignore[arg-type]
