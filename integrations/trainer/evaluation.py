"""Held-out evaluation: greedy answers to prompts that are never trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from integrations.trainer.recipe import Recipe
from integrations.trainer.sampling import held_out_request
from integrations.trainer.tasks import TaskStream
from integrations.trainer.tokenizer import Tokenizer
from integrations.trainer.trajectory import GenerationRequest

Phase = Literal["start", "during", "end"]


class HeldOutEvaluation:
    """One evaluation in progress.

    The evaluations at the start and the end run alone, so every token of theirs has the version
    they are named after. One in the middle shares the engine with the training prompts and may
    finish under a later version; it is named after the version it began with.
    """

    def __init__(
        self,
        *,
        recipe: Recipe,
        tasks: TaskStream,
        tokenizer: Tokenizer,
        version: int,
        phase: Phase,
    ) -> None:
        self.version = version
        self.phase: Phase = phase
        self._tasks = tasks
        self._prompts = [tasks.held_out(index) for index in range(recipe.evaluation.prompts)]
        self._requests = [
            held_out_request(recipe, tokenizer, prompt, version) for prompt in self._prompts
        ]
        self._entries = {
            request.request_id: prompt.entry
            for request, prompt in zip(self._requests, self._prompts, strict=True)
        }
        self._scores: dict[str, float] = {}

    @property
    def exclusive(self) -> bool:
        """Whether no training prompt may run meanwhile."""
        return self.phase != "during"

    @property
    def prompts(self) -> int:
        return len(self._requests)

    @property
    def done(self) -> bool:
        return len(self._scores) == len(self._requests)

    @property
    def reward(self) -> float:
        """Mean score over the held-out prompts."""
        return sum(self._scores.values()) / len(self._scores)

    def requests(self, replicas: int) -> list[list[GenerationRequest]]:
        """The requests, in one share per replica."""
        shares = [self._requests[index::replicas] for index in range(replicas)]
        return [share for share in shares if share]

    def owns(self, request_id: str) -> bool:
        return request_id in self._entries

    def add(self, request_id: str, response: str) -> None:
        self._scores[request_id] = self._tasks.score(self._entries[request_id], response)


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Mean held-out reward of one version."""

    version: int
    phase: Phase
    reward: float
    prompts: int


class EvaluationSchedule:
    """Evaluates the first version, the last, and every n-th in between; one at a time."""

    def __init__(self, recipe: Recipe, tasks: TaskStream, tokenizer: Tokenizer) -> None:
        self._recipe = recipe
        self._tasks = tasks
        self._tokenizer = tokenizer
        self._current: HeldOutEvaluation | None = None
        self._begun: set[int] = set()

    @property
    def exclusive(self) -> bool:
        """Whether an evaluation is running that no training prompt may disturb."""
        return self._current is not None and self._current.exclusive

    @property
    def complete(self) -> bool:
        """Whether the last version is evaluated."""
        return self._current is None and self._recipe.learner.steps in self._begun

    def mark_done(self, version: int) -> None:
        """An earlier process has evaluated this version."""
        self._begun.add(version)

    def begin(self, committed_version: int) -> HeldOutEvaluation | None:
        """The evaluation to start now, or None."""
        phase = self._phase(committed_version)
        if phase is None or self._current is not None or committed_version in self._begun:
            return None
        self._begun.add(committed_version)
        self._current = HeldOutEvaluation(
            recipe=self._recipe,
            tasks=self._tasks,
            tokenizer=self._tokenizer,
            version=committed_version,
            phase=phase,
        )
        return self._current

    def add(self, request_id: str, response: str) -> bool:
        """Score a response; False if the request is not one of the evaluation's."""
        if self._current is None or not self._current.owns(request_id):
            return False
        self._current.add(request_id, response)
        return True

    def finish(self) -> EvaluationResult | None:
        """The result, once every response is in."""
        current = self._current
        if current is None or not current.done:
            return None
        self._current = None
        return EvaluationResult(current.version, current.phase, current.reward, current.prompts)

    def _phase(self, version: int) -> Phase | None:
        if version == 0:
            return "start"
        if version == self._recipe.learner.steps:
            return "end"
        every = self._recipe.evaluation.every
        return "during" if every and version % every == 0 else None
