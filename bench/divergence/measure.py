"""Rows of the table: rollout against trainer, scenario by scenario, stock and in lockstep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from bench.divergence.rollout import Job, run_embedded, run_vllm
from bench.divergence.sample import Answer
from bench.divergence.train import Scores, score
from consistency import mismatch_metrics
from consistency.routing_replay import router_flip_rate

__all__ = ["Measured", "Row", "measure"]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; the fields are the keys of ``--json``.

    Attributes:
        tokens: sampled tokens compared.
        exact_fraction: share with equal log-probabilities, bit for bit.
        mean_abs_diff, max_abs_diff, k3_kl, ess: as in `MismatchMetrics`.
        router_flip_rate: share of (token, layer) pairs sent to other experts; 0 when dense.
        scenario: one of `SCENARIOS`.
        contract: "stock", or the contract's digest.
    """

    tokens: int
    exact_fraction: float
    mean_abs_diff: float
    max_abs_diff: float
    k3_kl: float
    ess: float
    router_flip_rate: float
    scenario: str
    contract: str

    def as_dict(self) -> dict[str, float | int | str]:
        """The row as ``--json`` has it."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Measured:
    """A row, and the differences behind it, learner minus rollout, per token."""

    row: Row
    differences: torch.Tensor


def measure(
    rollout: str,
    train: str,
    job: Job,
    train_operations: Sequence[str] | None,
    progress: Callable[[str], None],
    *,
    train_ranks: int = 1,
) -> list[Measured]:
    """Runs all scenarios of a job, and scores each with the trainer.

    Args:
        rollout: "vllm" or "embedded".
        train: one of `TRAINERS`.
        job: model, scenarios, workload, and the operations routed in the rollout engine.
        train_operations: routed in the trainer; None for the stock one.
        progress: told what is about to take a while.
        train_ranks: tensor-parallel ranks of the trainer.
    """
    contract = "stock" if job.operations is None else job.contract.digest()
    kind = "stock" if job.operations is None else "lockstep"
    progress(f"{rollout} samples ({kind})")
    answers = run_vllm(job) if rollout == "vllm" else run_embedded(job)
    measured = []
    for name, group in answers.items():
        progress(f"{train} scores {name} ({kind})")
        scores = score(
            train, job.model, group, train_operations, contract=job.contract, ranks=train_ranks
        )
        measured.append(_compare(name, contract, group, scores))
    return measured


def _compare(scenario: str, contract: str, answers: Sequence[Answer], scores: Scores) -> Measured:
    rollout = torch.cat([torch.tensor(answer.logprobs) for answer in answers])
    train = torch.cat(scores.logprobs)
    metrics = mismatch_metrics(train, rollout)
    flips = pairs = 0
    for answer, routes in zip(answers, scores.routes, strict=False):
        if answer.trace is not None:
            rows = min(answer.trace.tokens, len(routes))
            ours = answer.trace.expert_ids[:rows].to(torch.int64)
            flips += router_flip_rate(ours, routes[:rows]) * rows
            pairs += rows
    row = Row(
        tokens=metrics.tokens,
        exact_fraction=metrics.exact_fraction,
        mean_abs_diff=metrics.mean_abs_diff,
        max_abs_diff=metrics.max_abs_diff,
        k3_kl=metrics.k3_kl,
        ess=metrics.ess,
        router_flip_rate=flips / pairs if pairs else 0.0,
        scenario=scenario,
        contract=contract,
    )
    return Measured(row, train.double() - rollout.double())
