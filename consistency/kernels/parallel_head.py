"""The fused LM head with the vocabulary spread over the ranks of a process group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from consistency.kernels import _ranks
from consistency.kernels._arguments import (
    main_gradient,
    require_indices,
    require_integer,
    require_positive,
    require_shape,
)
from consistency.kernels._autograd import once_differentiable
from consistency.kernels._dispatch import one_device
from consistency.kernels.lm_head import backward_in_slices, gradient_statistics, require_head
from consistency.kernels.vocabulary_parallel import joined_statistics, lm_head_partial

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@one_device
def vocabulary_parallel_logprob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float,
    group: ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`lm_head_logprob` whose vocabulary is spread over the ranks; every rank gets the results.

    Neither [T, V] nor [T, V / R] is stored. Four numbers per token and rank travel forward, and
    dhidden in fp32 backward.

    Args:
        hidden: [T, K], float32, bfloat16 or float16, the same on all ranks.
        weight: [V / R, K], the rows [rank V / R, (rank + 1) V / R); `main_grad` as in `linear`.
        targets: [T] int64, ids of the whole vocabulary, the same on all ranks.
        temperature: finite and above 0.
        group: the ranks; by default all of them.

    Returns:
        (logprob, entropy), each [T] float32; the gradients that arrive must be the same on all
        ranks.

    Raises:
        UnsupportedError: no process group, a number of ranks or a V that the contract's trees are
            not cut for, or a dtype, layout or device that the kernels do not take.
        InvalidInputError: shapes that do not fit, a target outside the vocabulary, or a temperature
            that is not finite and positive.

    Order of reduction:
        That of `lm_head_logprob`: a rank's parts of the vocabulary are a subtree.
    """
    require_head(hidden, weight)
    rank, size = _ranks.rank_and_size(group)
    vocabulary = weight.shape[0] * size
    require_integer("targets", targets, 1)
    require_shape("targets", targets, hidden.shape[:1], "one per row")
    require_indices("targets", targets, vocabulary, "the vocabulary of all ranks")
    temperature = require_positive("temperature", temperature)
    parts = _ranks.chunks_per_rank("V", vocabulary, size)
    return _VocabularyParallelLogprob.apply(
        hidden, weight, targets, temperature, parts, group, rank, size
    )


class _VocabularyParallelLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        parts: int,
        group: ProcessGroup | None,
        rank: int,
        size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first = rank * weight.shape[0]
        targets = targets.contiguous()
        partial = lm_head_partial(
            hidden, weight, targets, temperature=temperature, first=first, parts=parts
        )
        partials = _ranks.all_gather(partial.unsqueeze(0), group, size)
        logprob, entropy, maximum, total = joined_statistics(partials)
        ctx.save_for_backward(hidden, weight, targets, maximum, total, entropy.clone())
        ctx.weight, ctx.temperature, ctx.parts, ctx.first = weight, temperature, parts, first
        ctx.group, ctx.size = group, size
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        hidden, weight, targets, *saved = ctx.saved_tensors
        buffer = main_gradient(ctx.weight)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = buffer if buffer is not None else weight.new_empty(weight.shape)
        partial = backward_in_slices(
            hidden,
            weight,
            targets,
            ctx.temperature,
            gradient_statistics(saved, grads),
            grad_weight,
            accumulate=buffer is not None,
            parts=ctx.parts,
            first=ctx.first,
        )
        grad_hidden = _ranks.all_reduce(partial, ctx.group, ctx.size).to(hidden.dtype)
        returned = None if buffer is not None else grad_weight
        return grad_hidden, returned, None, None, None, None, None, None
