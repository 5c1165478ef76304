"""Held-out evaluation: greedy answers to prompts that are never trained on."""

from __future__ import annotations

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
