"""The learner: warm start, GRPO steps with replayed routing, and the weights of each version."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from consistency import kernels
from consistency.correction import (
    Correction,
    CorrectionRule,
    LossCounts,
    PolicyLoss,
    aggregate,
    group_advantage,
    policy_loss,
)
from consistency.metrics import mismatch_metrics
from consistency.routing_replay import RoutingReplayer
from integrations.errors import LearnerError
from integrations.trainer.learner.audit import NO_AUDIT, audit_drift
from integrations.trainer.learner.batch import (
    PackedBatch,
    pack,
    pack_supervised,
    split_by_tokens,
)
from integrations.trainer.learner.optimizer import MasterOptimizer
from integrations.trainer.learner.schedule import policy_gradient_rate, warm_start_rate
from integrations.trainer.model.attention import VarlenAttention
from integrations.trainer.model.decoder import Decoder
from integrations.trainer.model.weights import lm_head_weight
from integrations.trainer.quantisation import WeightQuantiser
from integrations.trainer.recipe import Recipe
from integrations.trainer.trajectory import Trajectory

Example = tuple[Sequence[int], Sequence[int]]
OnProgress = Callable[[], None]


@dataclass(slots=True)
class _StepTotals:
    """Sums over the micro-batches of one step."""

    loss: float = 0.0
    entropy: float = 0.0
    tokens: int = 0
    dropped: int = 0
    clipped: float = 0.0
    gradient_norm: float = 0.0
    anchors: list[Tensor] = field(default_factory=list)
    rollout: list[Tensor] = field(default_factory=list)

    def add(
        self,
        batch: PackedBatch,
        loss: Tensor,
        entropy: Tensor,
        correction: Correction,
        policy: PolicyLoss,
        lp_old: Tensor,
    ) -> None:
        tokens = len(batch.targets)
        self.loss += loss.item()
        self.entropy += entropy.detach().sum().item()
        self.tokens += tokens
        self.dropped += correction.loss_tokens - correction.kept_tokens
        self.clipped += policy.clip_fraction * tokens
        self.anchors.append(lp_old)
        self.rollout.append(batch.rollout_logprobs)


class Learner:
    """One policy being trained.

    Args:
        recipe: the resolved recipe.
        decoder: the model definition shared with the rollout engine.
        weights: bf16 compute weights of `version`; stepped in place.
        correction: the rule for what the rollout engine did differently.
        version: weight version that `weights` are.
        quantiser: of the weights that are trained and served quantised, or None.
    """

    def __init__(
        self,
        recipe: Recipe,
        decoder: Decoder,
        weights: dict[str, Tensor],
        correction: CorrectionRule,
        version: int = 0,
        quantiser: WeightQuantiser | None = None,
    ) -> None:
        settings = recipe.learner
        self._recipe = recipe
        self._decoder = decoder
        self._correction = correction
        self.weights = weights
        self.version = version
        self.optimizer = MasterOptimizer(
            weights,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            gradient_clip=settings.gradient_clip,
            quantiser=quantiser,
        )
        # A trajectory in a batch is at most `staleness.max` versions old when it is consumed, and
        # was prefilled under one version before that at the earliest.
        self._keep = recipe.staleness.max + 2
        self._history: OrderedDict[int, dict[str, Tensor]] = OrderedDict()

    # ------------------------------------------------------------------ supervised warm start

    def warm_start(
        self,
        examples: Callable[[int], Sequence[Example]],
        on_step: Callable[[int, float], None],
    ) -> None:
        """Next-token training on the tasks' own answers.

        The optimizer keeps its moments for the policy gradient. With fresh ones its first steps
        would have full length whatever the gradient, and unlearn what was just learned.

        Args:
            examples: the (prompt, answer) token pairs of a step.
            on_step: told the step, from 1, and its loss.
        """
        settings = self._recipe.warm_start
        if settings is None:
            return
        for step in range(1, settings.steps + 1):
            rate = warm_start_rate(settings, step)
            on_step(step, self._supervised_step(list(examples(step)), step, rate))

    def _supervised_step(self, examples: list[Example], step: int, rate: float) -> float:
        lengths = [len(prompt) + len(answer) - 1 for prompt, answer in examples]
        total = sum(len(answer) for _, answer in examples)
        self.optimizer.zero_gradient()
        loss_sum = 0.0
        for run in split_by_tokens(lengths, self._recipe.learner.micro_batch_tokens):
            batch = pack_supervised([examples[index] for index in run])
            logprob, _ = self._logprobs(batch, temperature=1.0)
            loss = -logprob.sum() / total
            self._require_finite(loss, f"warm start step {step}", what="loss")
            loss.backward()
            loss_sum += loss.item()
        self.optimizer.step(rate)
        return loss_sum

    # ------------------------------------------------------------------ policy gradient

    def step(
        self, trajectories: Sequence[Trajectory], *, audit: bool, on_progress: OnProgress
    ) -> dict[str, float]:
        """Take one policy-gradient step and move on to the next weight version.

        Args:
            trajectories: whole groups, each with a reward.
            audit: measure the drift of some of them under the versions that sampled them.
            on_progress: called between micro-batches, for the watchdog.

        Returns:
            The metrics of the step, keys as in the `step` event.

        Raises:
            LearnerError: loss or gradient is not finite, or a trajectory has no reward. The weights
                are then those of the version before.
        """
        settings = self._recipe.learner
        rewards = torch.tensor([_reward(sample) for sample in trajectories], dtype=torch.float32)
        groups = torch.tensor([sample.prompt_index for sample in trajectories])
        advantages = group_advantage(rewards, groups, settings.advantage)
        metrics = (
            audit_drift(
                self._decoder,
                self._versions(),
                trajectories,
                limit=self._recipe.drift.trajectories,
            )
            if audit
            else dict(NO_AUDIT)
        )
        on_progress()
        totals = _StepTotals()
        minibatches = [
            self._pack([trajectories[index] for index in part], advantages[part])
            for part in _minibatches(groups.tolist(), settings.minibatches)
        ]
        # With several updates per step the clip is anchored at the weights the step began with;
        # with one update those are the weights of the pass that carries the gradient.
        anchors = (
            [[self._anchor(batch) for batch in batches] for batches in minibatches]
            if len(minibatches) > 1
            else None
        )
        previous = self._snapshot()
        for index, batches in enumerate(minibatches):
            rate = policy_gradient_rate(settings, self.version * settings.minibatches + index)
            self._update(batches, anchors[index] if anchors else None, rate, totals, on_progress)
        self._remember(previous)
        self.version += 1
        mismatch = mismatch_metrics(torch.cat(totals.anchors), torch.cat(totals.rollout))
        metrics.update(
            loss=totals.loss / settings.minibatches,
            reward_mean=rewards.mean().item(),
            reward_std=rewards.std(unbiased=False).item(),
            entropy=totals.entropy / max(totals.tokens, 1),
            off_policy_k3_kl=mismatch.k3_kl,
            ess=mismatch.ess,
            masked_fraction=totals.dropped / max(totals.tokens, 1),
            clip_fraction=totals.clipped / max(totals.tokens, 1),
            gradient_norm=totals.gradient_norm / settings.minibatches,
            tokens=float(totals.tokens),
            trajectories=float(len(trajectories)),
        )
        return metrics

    def _pack(self, trajectories: Sequence[Trajectory], advantages: Tensor) -> list[PackedBatch]:
        """The micro-batches of one update."""
        lengths = [len(sample.token_ids) - 1 for sample in trajectories]
        return [
            pack(
                [trajectories[index] for index in run],
                advantages[run.start : run.stop].tolist(),
                replay=self._replays,
            )
            for run in split_by_tokens(lengths, self._recipe.learner.micro_batch_tokens)
        ]

    @torch.no_grad()
    def _anchor(self, batch: PackedBatch) -> Tensor:
        return self._logprobs(batch, temperature=self._recipe.sampling.temperature)[0]

    def _update(
        self,
        batches: Sequence[PackedBatch],
        anchors: Sequence[Tensor] | None,
        rate: float,
        totals: _StepTotals,
        on_progress: OnProgress,
    ) -> None:
        """One optimizer step; the loss is a token mean over all micro-batches together."""
        settings = self._recipe.learner
        counts = LossCounts(
            tokens=sum(len(batch.targets) for batch in batches),
            sequences=sum(len(batch.cu_seqlens) - 1 for batch in batches),
        )
        self.optimizer.zero_gradient()
        for index, batch in enumerate(batches):
            lp, entropy = self._logprobs(batch, temperature=self._recipe.sampling.temperature)
            self._require_finite(lp.sum(), f"step {self.version + 1}", what="log-probability")
            lp_old = lp.detach() if anchors is None else anchors[index]
            correction = self._correction(
                lp_old, batch.rollout_logprobs, cu_seqlens=batch.token_cu_seqlens
            )
            policy = policy_loss(
                lp,
                lp_old,
                batch.advantages,
                clip_low=settings.clip_low,
                clip_high=settings.clip_high,
                correction=correction,
            )
            loss = aggregate(
                policy.per_token,
                torch.ones_like(lp_old, dtype=torch.bool),
                "token-mean",
                kept=correction.mask,
                counts=counts,
            )
            self._require_finite(loss, f"step {self.version + 1}", what="loss")
            loss.backward()
            totals.add(batch, loss, entropy, correction, policy, lp_old)
            on_progress()
        totals.gradient_norm += self.optimizer.step(rate)

    def _logprobs(self, batch: PackedBatch, *, temperature: float) -> tuple[Tensor, Tensor]:
        """Logprob and entropy of every target, fp32 [tokens], with gradient."""
        replayer = None
        if batch.routes is not None:
            replayer = RoutingReplayer(
                batch.routes.expert_ids,
                batch.routes.valid,
                layers=batch.routes.layers,
                experts=batch.routes.experts,
            )
        hidden = self._decoder.forward(
            self.weights,
            batch.token_ids,
            batch.positions,
            VarlenAttention(batch.cu_seqlens),
            replayer,
        )
        if replayer is not None:
            replayer.finish()
        return kernels.lm_head_logprob(
            hidden.index_select(0, batch.selected),
            lm_head_weight(self.weights),
            batch.targets,
            temperature=temperature,
        )

    @property
    def _replays(self) -> bool:
        return self._recipe.routing_replay and bool(self._decoder.config.moe_layers)

    @staticmethod
    def _require_finite(value: Tensor, when: str, *, what: str) -> None:
        number = value.item()
        if not math.isfinite(number):
            raise LearnerError(
                f"the {what} is {number} at {when}; nothing of this step was published; lower "
                "learner.learning_rate and resume from an earlier checkpoint"
            )

    # ------------------------------------------------------------------ versions

    def _snapshot(self) -> dict[str, Tensor]:
        return {name: weight.detach().clone() for name, weight in self.weights.items()}

    def _versions(self) -> dict[int, Mapping[str, Tensor]]:
        """Weights of every version that is still in memory."""
        current = {name: weight.detach() for name, weight in self.weights.items()}
        return {**self._history, self.version: current}

    def _remember(self, weights: dict[str, Tensor]) -> None:
        self._history[self.version] = weights
        while len(self._history) > self._keep:
            self._history.popitem(last=False)


def _reward(trajectory: Trajectory) -> float:
    if trajectory.reward is None or not math.isfinite(trajectory.reward):
        raise LearnerError(
            f"trajectory {trajectory.request_id!r} has reward {trajectory.reward}; score it with a "
            "finite number before training"
        )
    return trajectory.reward


def _minibatches(groups: Sequence[int], count: int) -> list[list[int]]:
    """Indices of the trajectories of each minibatch; a group is never split."""
    prompts = list(dict.fromkeys(groups))
    size = -(-len(prompts) // count)
    parts = []
    for start in range(0, len(prompts), size):
        members = set(prompts[start : start + size])
        parts.append([index for index, group in enumerate(groups) if group in members])
    return parts
