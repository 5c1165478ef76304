"""`Answer`: what one request came to, whichever engine sampled it; and its way through a file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from consistency.routing_replay import RoutingTrace

__all__ = ["Answer", "read_answers", "write_answers"]


@dataclass(frozen=True, slots=True)
class Answer:
    """A sampled answer.

    Attributes:
        prompt, tokens: ids.
        logprobs: fp32 of each token, as the engine reports them.
        trace: expert ids of all tokens but the last, of an MoE model.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    trace: RoutingTrace | None = field(default=None, repr=False)

    @property
    def sequence(self) -> list[int]:
        """Prompt and answer."""
        return [*self.prompt, *self.tokens]


class _Stored(msgspec.Struct):
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    trace: bytes | None


def write_answers(path: Path, answers: dict[str, list[Answer]]) -> None:
    """Stores answers by scenario."""
    stored = {
        name: [
            _Stored(
                list(answer.prompt),
                list(answer.tokens),
                list(answer.logprobs),
                None if answer.trace is None else answer.trace.to_bytes(),
            )
            for answer in group
        ]
        for name, group in answers.items()
    }
    path.write_bytes(msgspec.msgpack.encode(stored))


def read_answers(path: Path) -> dict[str, list[Answer]]:
    """Reads what `write_answers` stored."""
    stored = msgspec.msgpack.decode(path.read_bytes(), type=dict[str, list[_Stored]])
    return {
        name: [
            Answer(
                tuple(answer.prompt),
                tuple(answer.tokens),
                tuple(answer.logprobs),
                None if answer.trace is None else RoutingTrace.from_bytes(answer.trace),
            )
            for answer in group
        ]
        for name, group in stored.items()
    }
