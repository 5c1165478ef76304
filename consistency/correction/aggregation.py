"""Aggregation: from one loss per token to the scalar that is differentiated.

Micro-batches and data-parallel ranks must not change the loss. So the denominators can be given as
the counts of the *whole* batch: add the `LossCounts` of every micro-batch (and all-reduce them),
pass the sum to each call, and add the results; a framework that averages gradients over its ranks
is undone by ``scale = number of ranks``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from consistency.errors import InvalidInputError
from consistency.token_layout import TokenLayout

AggregationMode = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
Denominator = Literal["original", "kept"]

_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@dataclass(frozen=True, slots=True)
class LossCounts:
    """What a mean divides by: counted tokens, and sequences with at least one of them."""

    tokens: int
    sequences: int

    def __post_init__(self) -> None:
        if min(self.tokens, self.sequences) < 0 or self.sequences > self.tokens:
            raise InvalidInputError(
                f"counts are {self.tokens} tokens in {self.sequences} sequences: "
                "use 0 <= sequences <= tokens"
            )

    @classmethod
    def of(cls, mask: Tensor, *, cu_seqlens: Tensor | None = None) -> LossCounts:
        """Counts of one micro-batch.

        Args:
            mask: ``[B, T]`` or packed ``[T]``, bool or 0/1. For ``denominator="kept"`` the
                correction's mask, else the loss mask.
            cu_seqlens: int ``[S + 1]``, cuts a packed batch.
        """
        counts = TokenLayout.of(mask, mask, cu_seqlens).counts()
        return cls(int(counts.sum()), int((counts > 0).sum()))

    def __add__(self, other: LossCounts) -> LossCounts:
        return LossCounts(self.tokens + other.tokens, self.sequences + other.sequences)


def aggregate(
    loss: Tensor,
    mask: Tensor,
    mode: AggregationMode = "token-mean",
    *,
    kept: Tensor | None = None,
    denominator: Denominator = "original",
    counts: LossCounts | None = None,
    norm: float | None = None,
    scale: float = 1.0,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The scalar loss of a (micro-)batch.

        token-mean               sum of all tokens / number of tokens
        seq-mean-token-sum       mean over sequences of the sum of their tokens
        seq-mean-token-mean      mean over sequences of the mean of their tokens
        seq-mean-token-sum-norm  sum of all tokens / norm   (Dr.GRPO; no division by sequences)

    Sequences without a counted token are left out of a mean over sequences.

    Args:
        loss: per-token loss, ``[B, T]`` or packed ``[T]``.
        mask: loss mask, same shape, bool or 0/1.
        mode: one of the above.
        kept: tokens that stay after rejection (`Correction.mask`), a subset of ``mask``; None =
            all.
        denominator: ``original`` divides by what ``mask`` counts, so that rejection shrinks the
            loss; ``kept`` by what is left, so that it does not.
        counts: denominators of the whole batch; None = this call holds the whole batch.
        norm: constant of ``seq-mean-token-sum-norm``, required there, > 0. (verl's default is the
            width of the padded batch, ``loss.shape[1]``, which makes the loss depend on padding.)
        scale: multiplies the result: the number of data-parallel ranks whose gradients are
            averaged.
        cu_seqlens: int ``[S + 1]``, cuts a packed batch.

    Returns:
        fp32 scalar. Without any counted token 0, still attached to the graph, so that backward and
        collectives run.

    Raises:
        InvalidInputError: shapes that do not fit, an unknown mode, a missing or superfluous
            ``norm``, ``kept`` outside ``mask``, or ``counts`` smaller than this micro-batch's own.
    """
    if mode not in _MODES:
        raise InvalidInputError(f"mode is {mode!r}: use one of {', '.join(_MODES)}")
    if denominator not in ("original", "kept"):
        raise InvalidInputError(f"denominator is {denominator!r}: use 'original' or 'kept'")
    if (norm is not None) != (mode == "seq-mean-token-sum-norm") or (
        norm is not None and norm <= 0
    ):
        raise InvalidInputError(
            f"norm is {norm!r} for mode {mode!r}: 'seq-mean-token-sum-norm' needs a norm above 0, "
            "the other modes take none"
        )
    original = TokenLayout.of(loss, mask, cu_seqlens)
    remaining = original if kept is None else TokenLayout.of(loss, kept, cu_seqlens)
    if bool((remaining.mask & ~original.mask).any()):
        raise InvalidInputError("kept marks a token that mask does not: pass the correction's mask")
    dividing = original if denominator == "original" else remaining
    own = dividing.counts()
    tokens, sequences = int(own.sum()), int((own > 0).sum())
    if counts is not None:
        if counts.tokens < tokens or counts.sequences < sequences:
            raise InvalidInputError(
                f"counts are {counts.tokens} tokens in {counts.sequences} sequences, less than "
                f"this micro-batch's own {tokens} in {sequences}: add up every micro-batch's"
            )
        tokens, sequences = counts.tokens, counts.sequences
    sums = remaining.sum(loss)
    if mode == "token-mean":
        value = sums.sum() / max(tokens, 1)
    elif mode == "seq-mean-token-sum":
        value = sums.sum() / max(sequences, 1)
    elif mode == "seq-mean-token-mean":
        value = (sums / own.clamp(min=1)).sum() / max(sequences, 1)
    else:
        value = sums.sum() / (norm or 1.0)
    dtype = torch.float64 if loss.dtype == torch.float64 else torch.float32
    return (value * scale).to(dtype)
