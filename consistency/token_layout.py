"""`TokenLayout`: which tokens of a batch count, and which sequence each belongs to.

One frozen record is shared by everything that works on per-token arrays, so that padded ``[B, T]``
batches and packed ``[T]`` batches take the same code path and sums per sequence have one order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from consistency.errors import InvalidInputError

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before exp, per token and again per sequence sum: e^20 is already
past any weight that a correction keeps, and fp32 overflows at e^88."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenLayout:
    """Mask and sequences of a batch of tokens.

    Args:
        mask: bool ``[B, T]`` or ``[T]``; True = a token that the policy produced.
        lengths: int64 ``[S]``: entries of each sequence, in order; they add up to ``mask.numel()``.
    """

    mask: Tensor
    lengths: Tensor

    @classmethod
    def of(
        cls, values: Tensor, mask: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> TokenLayout:
        """Layout of ``values``.

        Args:
            values: ``[B, T]`` (one sequence per row), or ``[T]``: one sequence, unless
                ``cu_seqlens`` cuts it.
            mask: same shape, bool or 0/1; None = every token counts.
            cu_seqlens: integer ``[S + 1]``, first 0, last T, never decreasing; for ``[T]`` only.

        Raises:
            InvalidInputError: a shape, dtype or value that does not fit.
        """
        if not isinstance(values, Tensor) or values.dim() not in (1, 2):
            found = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise InvalidInputError(
                f"per-token values are {found}: use a tensor [tokens] (packed) or [batch, tokens]"
            )
        if mask is None:
            mask = torch.ones(values.shape, dtype=torch.bool, device=values.device)
        else:
            mask = _as_bool(mask, values)
        if cu_seqlens is not None:
            return cls(mask, _lengths_of(cu_seqlens, values))
        rows, width = (1, values.shape[0]) if values.dim() == 1 else values.shape
        return cls(mask, torch.full((rows,), width, dtype=torch.int64, device=values.device))

    @property
    def sequences(self) -> int:
        """Number of sequences S, empty ones included."""
        return self.lengths.shape[0]

    def counts(self) -> Tensor:
        """Tokens that count in each sequence: int64 ``[S]``."""
        return self.sum(torch.ones_like(self.mask, dtype=torch.float64)).to(torch.int64)

    def sum(self, values: Tensor) -> Tensor:
        """Sum over each sequence's counted tokens, in token order, so that padding cannot change
        it.

        Args:
            values: the layout's shape; entries outside the mask may hold anything.

        Returns:
            ``[S]`` float64; a sequence without counted tokens gives 0. Differentiable.
        """
        return sum_by_length(self.select(values).to(torch.float64).reshape(-1), self.lengths)

    def mean(self, values: Tensor) -> Tensor:
        """Mean over each sequence's counted tokens: float64 ``[S]``, 0 where there are none."""
        return self.sum(values) / self.counts().clamp(min=1)

    def maximum(self, values: Tensor) -> Tensor:
        """Largest value among each sequence's counted tokens: ``[S]``, -inf where there are
        none."""
        counted = torch.where(self.mask, values, -torch.inf)
        return maximum_by_length(counted.reshape(-1), self.lengths)

    def spread(self, per_sequence: Tensor) -> Tensor:
        """``[S]`` to the layout's shape: each token gets its sequence's value. Differentiable."""
        if self.mask.dim() == 2:
            return per_sequence[:, None].expand(self.mask.shape)
        index = torch.arange(self.sequences, device=self.lengths.device)
        return per_sequence[index.repeat_interleave(self.lengths, output_size=self.mask.numel())]

    def select(self, values: Tensor) -> Tensor:
        """``values`` where the mask is True, 0 elsewhere; what is masked gets no gradient."""
        return torch.where(
            self.mask, values, torch.zeros((), dtype=values.dtype, device=values.device)
        )

    def logprobs(self, name: str, values: Tensor) -> Tensor:
        """Checks log-probabilities and returns them with 0 outside the mask, in fp32 or fp64.

        A token that counts must have a finite log-probability. A missing one is never filled in:
        0.0 would mean a probability of 1.

        Raises:
            InvalidInputError: wrong shape or dtype, or a non-finite value under the mask.
        """
        if not isinstance(values, Tensor) or values.shape != self.mask.shape:
            found = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise InvalidInputError(
                f"{name} is {found}: use a tensor {list(self.mask.shape)}, entry t scoring token t"
            )
        if not values.is_floating_point():
            raise InvalidInputError(f"{name} has dtype {values.dtype}: use float32")
        bad = self.mask & ~torch.isfinite(values)
        if bool(bad.any()):
            place = bad.nonzero()[0].tolist()
            raise InvalidInputError(
                f"{name}{place} is {float(values[tuple(place)])}: a token of the loss mask has no "
                "log-probability, and none is made up for it; clear its mask or drop the sequence"
            )
        exact = values if values.dtype == torch.float64 else values.to(torch.float32)
        return self.select(exact)

    def log_ratio(
        self, numerator: tuple[str, Tensor], denominator: tuple[str, Tensor], *, clamp: bool = True
    ) -> Tensor:
        """log p_numerator - log p_denominator per token, 0 outside the mask.

        Args:
            numerator: name (for errors) and values.
            denominator: name and values.
            clamp: to +-`LOG_RATIO_LIMIT`.
        """
        difference = self.logprobs(*numerator) - self.logprobs(*denominator)
        return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT) if clamp else difference


def sum_by_length(values: Tensor, lengths: Tensor) -> Tensor:
    """Sums of consecutive runs of ``values`` ``[N]``, in order: ``[S]``; an empty run gives 0."""
    # Without any run there are no values either, and segment_reduce refuses empty lengths.
    if lengths.numel() == 0:
        return values
    return torch.segment_reduce(values, "sum", lengths=lengths, initial=0.0)


def maximum_by_length(values: Tensor, lengths: Tensor) -> Tensor:
    """Maxima of consecutive runs of ``values`` ``[N]``: ``[S]``; an empty run gives -inf."""
    if lengths.numel() == 0:
        return values
    return torch.segment_reduce(values, "max", lengths=lengths, initial=-torch.inf)


def _as_bool(mask: Tensor, values: Tensor) -> Tensor:
    if not isinstance(mask, Tensor) or mask.shape != values.shape:
        found = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise InvalidInputError(
            f"mask is {found}: use a tensor of the same shape as the values, {list(values.shape)}"
        )
    if mask.dtype == torch.bool:
        return mask
    as_bool = mask != 0
    if not bool((as_bool == mask).all()):
        raise InvalidInputError("mask holds values other than 0 and 1: use a bool or 0/1 tensor")
    return as_bool


def _lengths_of(cu_seqlens: Tensor, values: Tensor) -> Tensor:
    if values.dim() != 1:
        raise InvalidInputError(
            f"cu_seqlens came with values {list(values.shape)}: it cuts packed [tokens] only"
        )
    integral = isinstance(cu_seqlens, Tensor) and cu_seqlens.dtype in (torch.int32, torch.int64)
    if not integral or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise InvalidInputError("cu_seqlens is not an int32 or int64 tensor [sequences + 1]")
    starts = cu_seqlens.to(device=values.device, dtype=torch.int64)
    lengths = starts.diff()
    if int(starts[0]) != 0 or int(starts[-1]) != values.shape[0] or bool((lengths < 0).any()):
        raise InvalidInputError(
            f"cu_seqlens runs from {int(starts[0])} to {int(starts[-1])}: it must start "
            f"at 0, never decrease, and end at the number of tokens, {values.shape[0]}"
        )
    return lengths
