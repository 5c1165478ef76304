"""The eight ways in which the same requests reach a rollout engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch

__all__ = ["SCENARIOS", "Scenario", "Workload"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is special about one run of the workload.

    Attributes:
        solo: one request at a time.
        stagger: steps between two arrivals; 0 = all at once.
        chunk: most tokens of a step; None = enough for every prompt.
        warm: the prefix cache holds the prompts; otherwise it is empty.
        scarce: the cache holds about half of the sequences, so that requests are preempted.
    """

    name: str
    solo: bool = False
    stagger: int = 0
    chunk: int | None = None
    warm: bool = False
    scarce: bool = False


SCENARIOS: Final[Mapping[str, Scenario]] = MappingProxyType(
    {
        scenario.name: scenario
        for scenario in (
            Scenario(name="batch 16"),
            Scenario(name="solo", solo=True),
            Scenario(name="staggered", stagger=3),
            Scenario(name="chunked prefill", chunk=24),
            Scenario(name="prefix cold", stagger=1),
            Scenario(name="prefix hits", warm=True),
            Scenario(name="preemption", scarce=True),
            Scenario(name="all together", stagger=2, chunk=24, warm=True, scarce=True),
        )
    }
)


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of random tokens, half of which begin alike.

    Attributes:
        prompts: token ids of each request.
        answer: tokens to sample per request.
        seed: of request 0; request i has seed + i.
    """

    prompts: tuple[tuple[int, ...], ...]
    answer: int
    seed: int

    @classmethod
    def random(
        cls, vocabulary: int, *, requests: int, shortest: int, longest: int, answer: int, seed: int
    ) -> Workload:
        """Draws prompts; the same arguments give the same ones."""
        generator = torch.Generator().manual_seed(seed)

        def draw(count: int) -> tuple[int, ...]:
            return tuple(torch.randint(0, vocabulary, (count,), generator=generator).tolist())

        shared = draw(longest)
        prompts = []
        for index in range(requests):
            length = int(torch.randint(shortest, longest + 1, (1,), generator=generator))
            common = shared[: min(shortest, length - 1)] if index % 2 else ()
            prompts.append(common + draw(length - len(common)))
        return cls(tuple(prompts), answer, seed)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, answer included."""
        return max(len(prompt) for prompt in self.prompts) + self.answer
