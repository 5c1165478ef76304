"""The LM head of one rank that holds a slice of the vocabulary, and the join of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.kernels._arguments import (
    require_float,
    require_integer,
    require_positive,
    require_shape,
)
from consistency.kernels._dispatch import on_triton, one_device, triton_kernels
from consistency.kernels._gemm import require_chunks
from consistency.kernels.library import FLOAT, INT32, INT64, POINTER, Kernel, thread_count
from consistency.kernels.lm_head import blocks_of_logits, require_head

if TYPE_CHECKING:
    from collections.abc import Sequence

_partial_kernel = Kernel(
    "lockstep_token_logprob_partial",
    *(POINTER, INT64, INT64, INT64, INT64, INT64, POINTER, FLOAT, POINTER, INT64),
    INT32,
)
_join_kernel = Kernel(
    "lockstep_token_logprob_join", POINTER, INT64, INT64, POINTER, POINTER, POINTER, POINTER
)


@one_device
def lm_head_partial(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float,
    first: int,
    parts: int,
) -> torch.Tensor:
    """What one rank knows of the log-probabilities: four numbers per token, to be joined.

    It has no gradient of its own: `collectives.vocabulary_parallel_logprob` has the whole's.

    Args:
        hidden: [T, K], float32, bfloat16 or float16, the same on all ranks.
        weight: [V / R, K], the rows [first, first + V / R) of the whole weight.
        targets: [T] int64, ids of the whole vocabulary; most lie on other ranks.
        temperature: finite and above 0.
        first: the first id of this rank, 0 or more.
        parts: the parts of the vocabulary that fall to this rank: those of the whole V (see
            `token_logprob`) divided by the ranks R.

    Returns:
        [4, T] float32: m, sum exp(z - m), sum exp(z - m)(z - m), and z of the target, -inf where it
        is another rank's.

    Raises:
        UnsupportedError: a dtype, layout or device that the kernels do not take, or an argument
            that requires a gradient while gradients are on.
        InvalidInputError: shapes that do not fit, a negative target or first, parts that do not
            divide V / R, or a temperature that is not finite and positive.

    Order of reduction:
        The subtree of `token_logprob`'s tree over these parts.
    """
    require_head(hidden, weight)
    require_integer("targets", targets, 1)
    require_shape("targets", targets, hidden.shape[:1], "one per row")
    temperature = require_positive("temperature", temperature)
    require_chunks(parts, weight.shape[0])
    if weight.shape[0] == 0:
        raise InvalidInputError("weight must have rows: a rank without columns has no maximum")
    if first < 0:
        raise InvalidInputError(f"first must be 0 or more, got {first}")
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        raise UnsupportedError(
            "lm_head_partial has no gradient: use collectives.vocabulary_parallel_logprob, or call "
            "it under torch.no_grad()"
        )
    targets = targets.contiguous()
    out = hidden.new_empty((4, hidden.shape[0]), dtype=torch.float32)
    for start, stop, logits in blocks_of_logits(hidden, weight):
        if on_triton(logits):
            kernels = triton_kernels("token_logprob")
            rows = targets[start:stop]
            found = kernels.partial(logits, rows, temperature, first=first, parts=parts)
            out[:, start:stop] = kernels.join(found, finish=False)
            continue
        _partial_kernel(
            logits.data_ptr(),
            logits.stride(0),
            logits.shape[0],
            first,
            logits.shape[1],
            parts,
            targets.data_ptr() + start * targets.element_size(),
            temperature,
            out.data_ptr() + start * out.element_size(),
            out.shape[1],
            thread_count(),
        )
    return out


@one_device
def join_lm_head_partials(
    partials: torch.Tensor | Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Finishes the tree that the ranks began: the bits of `lm_head_logprob` of the whole.

    Args:
        partials: the results of `lm_head_partial` in rank order, a power of two of them, each
            [4, T] float32; or stacked, [R, 4, T].

    Returns:
        (logprob, entropy), each [T] float32.

    Raises:
        InvalidInputError: the number of partials is not a power of two, or they do not fit.

    Order of reduction:
        Neighbours pairwise, level by level; a join shifts both sides to the larger maximum.
    """
    logprob, entropy, _, _ = joined_statistics(stacked(partials))
    return logprob, entropy


def stacked(partials: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """The partials of all ranks as one checked tensor [R, 4, T]."""
    if not isinstance(partials, torch.Tensor):
        for rank, partial in enumerate(partials):
            require_float(f"partials[{rank}]", partial, 2)
            require_shape(f"partials[{rank}]", partial, partials[0].shape, "that of partials[0]")
        if not partials:
            raise InvalidInputError("partials must hold at least one rank's, got none")
        partials = torch.stack(list(partials))
    require_float("partials", partials, 3)
    ranks, four, tokens = partials.shape
    require_shape("partials", partials, (ranks, 4, tokens), "ranks, statistics, tokens")
    if four != 4 or partials.dtype != torch.float32:
        raise InvalidInputError(f"partials must be float32, got {partials.dtype}")
    if ranks < 1 or ranks & (ranks - 1):
        raise InvalidInputError(f"the number of partials must be a power of two, got {ranks}")
    return partials.contiguous()


def joined_statistics(partials: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(logprob, entropy, maximum, weight), each [T], from checked [R, 4, T]."""
    ranks, _, tokens = partials.shape
    if on_triton(partials):
        return triton_kernels("token_logprob").join(partials, finish=True).unbind()
    results = torch.empty((4, tokens), dtype=torch.float32).unbind()
    _join_kernel(partials.data_ptr(), ranks, tokens, *(result.data_ptr() for result in results))
    return results
