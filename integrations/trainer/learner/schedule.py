"""Learning rates as functions of the recipe and the step alone, so that a resumed run agrees."""

from __future__ import annotations

from integrations.trainer.recipe_sections import LearnerRecipe, WarmStartRecipe

# Supervised steps over which the learning rate rises: fresh moments make the first ones noisy.
WARM_START_WARMUP = 5


def warm_start_rate(settings: WarmStartRecipe, step: int) -> float:
    """Learning rate of supervised step ``step``, from 1: a short rise, then a linear fall.

    A final rate near that of the policy gradient hands over a policy that such steps do not
    disturb: one that has come to rest at rate 0 loses much of its accuracy in the first steps.
    """
    done = (step - 1) / settings.steps
    rate = settings.learning_rate + (settings.final_learning_rate - settings.learning_rate) * done
    return rate * min(1.0, step / (WARM_START_WARMUP + 1))


def policy_gradient_rate(settings: LearnerRecipe, update: int) -> float:
    """Learning rate of optimizer update ``update``, from 0 at the first policy-gradient update."""
    rise = min(1.0, (update + 1) / (settings.warmup_steps + 1))
    if settings.schedule == "constant":
        return settings.learning_rate * rise
    return settings.learning_rate * rise * (1.0 - update / (settings.steps * settings.minibatches))
