"""How sequences lie in the rows of one pass, and what is scored of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from consistency.routing_replay import RoutingTrace
from integrations.errors import RequestError

__all__ = ["Batch", "SampledAnswer"]


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of one pass; Megatron-Core lays the rows out sequence-major.

    Padded, token p of sequence i of b is row ``p b + i``: the transpose of a batch in memory.
    Packed, the sequences lie one after the other.

    Args:
        lengths: tokens of each sequence, at least one each.
        multiple: the padded width, or the packed length, is the next multiple of it; sequence
            parallelism needs the number of tensor-parallel ranks.
        packed: one after the other, instead of padded at the end.

    Raises:
        RequestError: no sequence, an empty one, or a multiple below 1.
    """

    lengths: tuple[int, ...]
    multiple: int = 1
    packed: bool = False

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise RequestError(f"lengths is {self.lengths}: a batch has sequences, none is empty")
        if self.multiple < 1:
            raise RequestError(f"multiple is {self.multiple}: use 1, or the tensor-parallel ranks")

    @property
    def width(self) -> int:
        """Positions of a padded row, or tokens of the packed batch with the padding at its end."""
        tokens = sum(self.lengths) if self.packed else max(self.lengths)
        return -(-tokens // self.multiple) * self.multiple

    @property
    def rows(self) -> int:
        """Rows of the pass over all tensor-parallel ranks, padding included."""
        return self.width if self.packed else self.width * len(self.lengths)

    @property
    def starts(self) -> torch.Tensor:
        """int32 ``[sequences + 1]`` of a packed batch; its padding belongs to the last sequence."""
        ends = torch.tensor((0, *self.lengths), dtype=torch.int32).cumsum(0).to(torch.int32)
        ends[-1] = self.width
        return ends

    def rows_of(self, sequence: int) -> torch.Tensor:
        """int64 ``[tokens]``: the rows of a sequence's tokens."""
        positions = torch.arange(self.lengths[sequence])
        if self.packed:
            return positions + sum(self.lengths[:sequence])
        return positions * len(self.lengths) + sequence

    def share(self, rank: int, size: int) -> slice:
        """The rows that rank `rank` of `size` has between the layers under sequence parallelism."""
        share = self.rows // size
        return slice(rank * share, (rank + 1) * share)

    def token_ids(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """int64 ``[sequences, width]``, or ``[1, width]`` packed; padding is 0.

        Raises:
            RequestError: sequences of other lengths.
        """
        if tuple(map(len, sequences)) != self.lengths:
            raise RequestError(
                f"the sequences have {tuple(map(len, sequences))} tokens, the batch {self.lengths}"
            )
        if self.packed:
            ids = torch.zeros(1, self.width, dtype=torch.int64)
            ids[0, : sum(self.lengths)] = torch.tensor([i for row in sequences for i in row])
            return ids
        ids = torch.zeros(len(self.lengths), self.width, dtype=torch.int64)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = torch.tensor(sequence)
        return ids


class SampledAnswer(Protocol):
    """What `score_answers` reads of an answer; `bench.divergence.sample.Answer` is one."""

    @property
    def prompt(self) -> Sequence[int]:
        """Token ids of the prompt."""
        ...

    @property
    def sequence(self) -> Sequence[int]:
        """Token ids of prompt and answer."""
        ...

    @property
    def trace(self) -> RoutingTrace | None:
        """The routes of the rollout engine, if it recorded them."""
        ...
