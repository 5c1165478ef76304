"""Where the sequences of a batch lie: padded rows of transformers to packed tokens and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from consistency.errors import InvalidInputError, UnsupportedError

__all__ = ["BatchShape", "sequence_starts"]


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The tokens of one batch that count.

    Attributes:
        rows, queries, keys: batch size, tokens of this pass and tokens of cache and pass together,
            per row, padding included.
        query_mask: bool ``[rows, queries]``, tokens of this pass that are not padding; None = all.
        key_mask: bool ``[rows, keys]``, the same over the keys.
    """

    rows: int
    queries: int
    keys: int
    query_mask: torch.Tensor | None
    key_mask: torch.Tensor | None

    @classmethod
    def of(
        cls, rows: int, queries: int, keys: int, attention_mask: torch.Tensor | None
    ) -> BatchShape:
        """Reads the two-dimensional mask of transformers.

        Args:
            rows, queries, keys: as above.
            attention_mask: ``[rows, keys]``, nonzero where a token counts; None = everywhere.

        Raises:
            UnsupportedError: a mask of another kind, which may hide arbitrary pairs of tokens.
            InvalidInputError: a mask of another shape, or with padding between tokens.
        """
        if attention_mask is None:
            return cls(rows, queries, keys, None, None)
        if attention_mask.dim() != 2:
            raise UnsupportedError(
                f"attention_mask has {attention_mask.dim()} dimensions: the kernels are causal; "
                "pass a two-dimensional padding mask, or none"
            )
        if tuple(attention_mask.shape) != (rows, keys):
            raise InvalidInputError(
                f"attention_mask has shape {tuple(attention_mask.shape)}: use ({rows}, {keys}), "
                "one entry per token of cache and pass"
            )
        mask = attention_mask.to(torch.bool)
        if bool(mask.all()):
            return cls(rows, queries, keys, None, None)
        runs = mask[:, 0].long() + (mask[:, 1:] & ~mask[:, :-1]).sum(1)
        if int(runs.max()) > 1:
            raise InvalidInputError(
                "attention_mask has padding between the tokens of a row: pad at one end"
            )
        return cls(rows, queries, keys, mask[:, keys - queries :], mask)

    def pack_queries(self, x: torch.Tensor) -> torch.Tensor:
        """``[rows, queries, ...]`` to ``[tokens, ...]``."""
        return x.flatten(0, 1) if self.query_mask is None else x[self.query_mask]

    def pack_keys(self, x: torch.Tensor) -> torch.Tensor:
        """``[rows, keys, ...]`` to ``[tokens, ...]``."""
        return x.flatten(0, 1) if self.key_mask is None else x[self.key_mask]

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """``[tokens, ...]`` to ``[rows, queries, ...]``, zeros at the padding."""
        if self.query_mask is None:
            return packed.unflatten(0, (self.rows, self.queries))
        out = packed.new_zeros((self.rows, self.queries, *packed.shape[1:]))
        out[self.query_mask] = packed
        return out

    def query_starts(self) -> torch.Tensor:
        """int32 ``[rows + 1]``: where the packed queries of each row start."""
        if self.query_mask is None:
            return torch.arange(self.rows + 1, dtype=torch.int32) * self.queries
        return _starts(self.query_mask.sum(1))

    def context_lengths(self) -> torch.Tensor:
        """int32 ``[rows]``: the keys of each row that count."""
        if self.key_mask is None:
            return torch.full((self.rows,), self.keys, dtype=torch.int32)
        return self.key_mask.sum(1).to(torch.int32)


def sequence_starts(position_ids: torch.Tensor) -> torch.Tensor:
    """int32 ``[sequences + 1]`` of rows that may each hold several packed sequences.

    A sequence starts at every row, and wherever a position does not follow the one before it.

    Args:
        position_ids: ``[rows, tokens]``.
    """
    starts = torch.ones(position_ids.shape, dtype=torch.bool)
    starts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    first = starts.flatten().nonzero().flatten()
    end = first.new_tensor([position_ids.numel()])
    return torch.cat((first, end)).to(torch.int32)


def _starts(counts: torch.Tensor) -> torch.Tensor:
    return torch.cat((counts.new_zeros(1), counts.cumsum(0))).to(torch.int32)
