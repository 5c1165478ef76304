"""Master weights, moments and schedules."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from integrations.errors import LearnerError
from integrations.trainer.learner.optimizer import MasterOptimizer
from integrations.trainer.learner.schedule import policy_gradient_rate, warm_start_rate
from integrations.trainer.recipe_sections import LearnerRecipe, WarmStartRecipe


def make(clip: float = 1e9, seed: int = 0) -> tuple[MasterOptimizer, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    weights = {
        "matrix": torch.randn(5, 7, generator=generator).to(torch.bfloat16),
        "norm": torch.ones(7, dtype=torch.bfloat16),
    }
    optimizer = MasterOptimizer(weights, betas=(0.9, 0.95), weight_decay=0.1, gradient_clip=clip)
    return optimizer, weights


def fill(weights: dict[str, torch.Tensor], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in weights.values():
        weight.main_grad.copy_(scale * torch.randn(weight.shape, generator=generator))  # type: ignore[attr-defined]


def test_weights_are_the_rounded_master_weights_of_adamw():
    optimizer, weights = make()
    masters = {name: weight.detach().float() for name, weight in weights.items()}
    for master in masters.values():
        master.requires_grad_(True)
    adamw = torch.optim.AdamW(
        [
            {"params": [masters["matrix"]], "weight_decay": 0.1},
            {"params": [masters["norm"]], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        fused=True,
    )
    for step, rate in enumerate([1e-2, 3e-3, 5e-2]):
        fill(weights, step)
        for name, master in masters.items():
            master.grad = weights[name].main_grad.clone()  # type: ignore[attr-defined]
        for group in adamw.param_groups:
            group["lr"] = rate
        adamw.step()
        optimizer.step(rate)
    for name, weight in weights.items():
        assert torch.equal(weight.detach(), masters[name].detach().to(torch.bfloat16)), name


def test_a_resumed_optimizer_takes_the_same_steps_bit_for_bit():
    ours, weights = make()
    for step in range(3):
        fill(weights, step)
        ours.step(1e-2)
    saved = {group: {n: t.clone() for n, t in part.items()} for group, part in ours.state().items()}
    other, others = make(seed=9)
    other.load_state(saved, ours.steps)
    for step in range(3, 6):
        fill(weights, step)
        fill(others, step)
        ours.step(1e-2)
        other.step(1e-2)
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_a_gradient_above_the_limit_is_scaled_and_its_norm_reported():
    optimizer, weights = make(clip=0.5)
    fill(weights, 0)
    expected = torch.cat([w.main_grad.flatten().double() for w in weights.values()]).norm().item()  # type: ignore[attr-defined]
    assert optimizer.step(1e-2) == pytest.approx(expected, rel=1e-12)
    assert optimizer.gradient_norm() == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(value):
    optimizer, weights = make()
    fill(weights, 0)
    weights["norm"].main_grad[3] = value  # type: ignore[attr-defined]
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    with pytest.raises(LearnerError, match=r"gradient norm is (nan|inf) at optimizer step 1"):
        optimizer.step(1e-2)
    assert optimizer.steps == 0
    assert all(torch.equal(weight.detach(), before[name]) for name, weight in weights.items())


def test_a_checkpoint_of_another_model_is_refused_by_name():
    optimizer, _ = make()
    groups = optimizer.state()
    del groups["master"]["norm"]
    with pytest.raises(LearnerError, match="'norm'"):
        make()[0].load_state(groups, 1)


def test_the_warm_start_hands_over_at_its_final_rate():
    settings = WarmStartRecipe(steps=100, learning_rate=1e-3, final_learning_rate=2e-4)
    rates = [warm_start_rate(settings, step) for step in range(1, 101)]
    assert rates[0] == pytest.approx(1e-3 / 6)
    assert max(rates) < 1e-3
    assert all(later < earlier for earlier, later in pairwise(rates[6:]))
    assert rates[-1] == pytest.approx(2e-4 + 8e-4 / 100)


def test_a_linear_schedule_ends_at_rest_and_a_constant_one_does_not():
    base = {"steps": 10, "minibatches": 2, "learning_rate": 1e-3, "warmup_steps": 3}
    linear = LearnerRecipe(**base, schedule="linear")
    rates = [policy_gradient_rate(linear, update) for update in range(20)]
    assert rates[0] == pytest.approx(1e-3 / 4)
    assert rates[10] == pytest.approx(0.5e-3)
    assert rates[19] == pytest.approx(1e-3 / 20)
    constant = LearnerRecipe(**base)
    assert policy_gradient_rate(constant, 0) == pytest.approx(1e-3 / 4)
    assert policy_gradient_rate(constant, 19) == 1e-3
