"""What one engine step reports."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from integrations.trainer.trajectory import Trajectory

__all__ = ["StepMetrics", "StepOutput"]


class StepOutput(msgspec.Struct, frozen=True, gc=False):
    """One sampled token.

    Made in every step for every request, hence invisible to the garbage collector, whose runs
    would cost more than the step's other bookkeeping; it can be part of no reference cycle.

    Attributes:
        request_id: whose token it is.
        token_id: the sampled token.
        logprob: its fp32 logprob under the sampling temperature.
        weight_version: the weights that sampled it.
        trajectory: the whole result if this token finished the request, else None.
    """

    request_id: str
    token_id: int
    logprob: float
    weight_version: int
    trajectory: Trajectory | None


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Counts of one step.

    Attributes:
        generated_tokens: tokens sampled.
        prefill_tokens: rows computed that did not continue a decode.
        cache_hit_tokens: rows that requests admitted in this step found in the prefix cache.
        running, waiting, paused: requests in each state after the step.
        preemptions: requests that lost their blocks in this step.
        free_blocks: blocks that a request could take, cached but unused ones included.
        seconds: wall time of the step.
    """

    generated_tokens: int = 0
    prefill_tokens: int = 0
    cache_hit_tokens: int = 0
    running: int = 0
    waiting: int = 0
    paused: int = 0
    preemptions: int = 0
    free_blocks: int = 0
    seconds: float = 0.0
