"""The LM head: fp32 logits, and the log-probability and entropy of a token under a temperature.

One C++ function turns logits into (logprob, entropy). The sampler calls it on stored logits
(`token_logprob`), the learner on blocks of logits that are thrown away (`lm_head_logprob`); so both
report the same bits for the same token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.kernels._arguments import (
    main_gradient,
    require_float,
    require_indices,
    require_integer,
    require_positive,
    require_shape,
)
from consistency.kernels._autograd import once_differentiable
from consistency.kernels._dispatch import on_triton, one_device, triton_kernels
from consistency.kernels._gemm import (
    ACCUMULATE,
    CONTINUE,
    WRITE,
    chunk_count,
    multiply,
    multiply_weight,
)
from consistency.kernels.library import FLOAT, INT32, INT64, POINTER, Kernel, thread_count
from consistency.kernels.linear import linear_with_chunks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Elements of the fp32 scratch tile in which logits live for a moment: 32 MiB.
_TILE_ELEMENTS = 1 << 23
# A GPU needs more rows at once: 512 MiB.
_GPU_TILE_ELEMENTS = 1 << 27
# A slice of the vocabulary is whole blocks of the reduction over it (see cpu/gemm.hpp).
_SLICE_GRANULE = 256

_token_logprob = Kernel(
    "lockstep_token_logprob",
    *(POINTER, INT64, INT64, INT64),
    *(POINTER, FLOAT),
    *(POINTER, POINTER, POINTER, POINTER),
    INT32,
)
_token_logprob_gradient = Kernel(
    "lockstep_token_logprob_gradient",
    *(POINTER, INT64, INT64, INT64, INT64),
    *(POINTER, FLOAT),
    *(POINTER, POINTER, POINTER),
    *(POINTER, POINTER),
    INT32,
)


@one_device
def lm_head_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """logits[t, v] = sum over k of hidden[t, k] weight[v, k], in fp32.

    Args:
        hidden: [T, K], float32, bfloat16 or float16.
        weight: [V, K], one of the same dtypes; `main_grad` as in `linear`.

    Returns:
        [T, V] float32.

    Raises:
        UnsupportedError: a dtype, layout or device that the kernels do not take.
        InvalidInputError: shapes that do not fit.

    Order of reduction:
        That of `linear` with one chunk. In the backward, dhidden reduces over V in the parts of
        `token_logprob`, so that vocabulary-parallel ranks compute subtrees.
    """
    require_head(hidden, weight)
    return linear_with_chunks(hidden, weight, None, torch.float32, chunks=1, tp_invariant=True)


@one_device
def token_logprob(
    logits: torch.Tensor, targets: torch.Tensor, *, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """logprob[t] = log softmax(logits[t] / temperature)[targets[t]], and the softmax's entropy.

    Args:
        logits: [T, V] float32.
        targets: [T] int64, each in [0, V).
        temperature: finite and above 0; logits are divided by it in fp32, once.

    Returns:
        (logprob, entropy), each [T] float32; gradients flow to `logits` from both.
        A logit of -inf has probability 0 and adds nothing to the entropy. A row that holds NaN or
        +inf, or nothing but -inf, has no softmax: both results of that row are NaN.

    Raises:
        UnsupportedError: logits that are not float32, targets that are not int64, another device.
        InvalidInputError: shapes that do not fit, a target outside the vocabulary, or a temperature
            that is not finite and positive.

    Order of reduction:
        A tree that depends on V alone: V is cut into the largest power of two P <= 8 parts with
        V % (64 P) == 0 (else one), a part into segments of 1024 columns, a segment into 16 lanes.
        Each part has its own maximum; binary trees join lanes, segments and parts, and a join of
        parts shifts both to the larger maximum, so that vocabulary-parallel ranks compute subtrees
        (`lm_head_partial`). The logarithm and the last subtraction are done in double and rounded
        once.
    """
    require_float("logits", logits, 2)
    if logits.dtype != torch.float32:
        raise UnsupportedError(
            f"logits must be float32, got {logits.dtype}: lm_head_logits returns float32, and "
            "rounded logits would lose the contract"
        )
    temperature = _require_targets(targets, logits.shape[0], logits.shape[1], temperature)
    if torch.is_grad_enabled() and logits.requires_grad:
        return _TokenLogprob.apply(logits, targets, temperature)
    logprob, entropy, _, _ = _forward(logits, targets.contiguous(), temperature)
    return logprob, entropy


@one_device
def lm_head_logprob(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """token_logprob(lm_head_logits(hidden, weight), targets) without storing [T, V]; the same bits.

    Args:
        hidden: [T, K], float32, bfloat16 or float16.
        weight: [V, K], one of the same dtypes. With an attribute `main_grad` (float32, [V, K]) its
            gradient is added there and autograd receives None.
        targets: [T] int64, each in [0, V).
        temperature: finite and above 0; logits are divided by it in fp32, once.

    Returns:
        (logprob, entropy), each [T] float32, as `token_logprob` returns them.

    Raises:
        UnsupportedError: a dtype, layout or device that the kernels do not take.
        InvalidInputError: shapes that do not fit, a target outside the vocabulary, or a temperature
            that is not finite and positive.

    Order of reduction:
        Those of `lm_head_logits` and `token_logprob`, forward and backward, whatever the size of
        the scratch tile: dhidden reduces over V in parts, dweight over the tokens in order.
    """
    require_head(hidden, weight)
    temperature = _require_targets(targets, hidden.shape[0], weight.shape[0], temperature)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _LmHeadLogprob.apply(hidden, weight, targets, temperature)
    logprob, entropy, _, _ = _forward_in_blocks(hidden, weight, targets.contiguous(), temperature)
    return logprob, entropy


def require_head(hidden: torch.Tensor, weight: torch.Tensor) -> None:
    require_float("hidden", hidden, 2)
    require_float("weight", weight, 2)
    if hidden.shape[1] != weight.shape[1]:
        raise InvalidInputError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} must have the same "
            "second dimension"
        )


def _require_targets(
    targets: torch.Tensor, rows: int, vocabulary: int, temperature: float
) -> float:
    require_integer("targets", targets, 1)
    require_shape("targets", targets, (rows,), "one per row")
    require_indices("targets", targets, vocabulary, "the vocabulary")
    return require_positive("temperature", temperature)


def _forward(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, ...]:
    """(logprob, entropy, maximum, weight) per row; the last two are kept for the gradient."""
    logits = _contiguous_rows(logits)
    results = logits.new_empty((4, logits.shape[0])).unbind()
    _rows(logits, targets, temperature, results)
    return results


def _rows(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    results: tuple[torch.Tensor, ...],
) -> None:
    if on_triton(logits):
        parts = chunk_count(logits.shape[1], tp_invariant=True)
        kernels = triton_kernels("token_logprob")
        partials = kernels.partial(logits, targets, temperature, first=0, parts=parts)
        found = kernels.join(partials, finish=True)
        for result, values in zip(results, found.unbind(), strict=True):
            result.copy_(values)
        return
    _token_logprob(
        logits.data_ptr(),
        logits.stride(0),
        *logits.shape,
        targets.data_ptr(),
        temperature,
        *(result.data_ptr() for result in results),
        thread_count(),
    )


def _contiguous_rows(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.stride(1) == 1 or logits.shape[1] <= 1 else logits.contiguous()


def _forward_in_blocks(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, ...]:
    """What `_forward` returns, for logits that exist one block of rows at a time."""
    results = hidden.new_empty((4, hidden.shape[0]), dtype=torch.float32).unbind()
    for start, stop, logits in blocks_of_logits(hidden, weight):
        part = tuple(result[start:stop] for result in results)
        _rows(logits, targets[start:stop], temperature, part)
    return results


def blocks_of_logits(
    hidden: torch.Tensor, weight: torch.Tensor
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(start, stop, logits of these rows) in one scratch tile that each step overwrites."""
    rows, vocabulary = hidden.shape[0], weight.shape[0]
    block = min(rows, max(1, _tile_elements(hidden) // max(1, vocabulary)))
    tile = hidden.new_empty((block, vocabulary), dtype=torch.float32)
    for start in range(0, rows, max(1, block)):
        stop = min(start + block, rows)
        yield start, stop, multiply_weight(hidden[start:stop], weight, tile[: stop - start])


def _tile_elements(hidden: torch.Tensor) -> int:
    return _GPU_TILE_ELEMENTS if hidden.is_cuda else _TILE_ELEMENTS


def _gradient(
    logits: torch.Tensor,
    first: int,
    targets: torch.Tensor,
    temperature: float,
    statistics: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """Turns columns [first, first + width) of the logits, in place, into their gradient."""
    if on_triton(logits):
        kernels = triton_kernels("token_logprob")
        return kernels.gradient(logits, first, targets, temperature, statistics)
    _token_logprob_gradient(
        logits.data_ptr(),
        logits.stride(0),
        logits.shape[0],
        first,
        logits.shape[1],
        targets.data_ptr(),
        temperature,
        *(statistic.data_ptr() for statistic in statistics),
        thread_count(),
    )
    return logits


def gradient_statistics(
    saved: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """(maximum, weight, entropy, grad_logprob, grad_entropy), each [T] float32."""
    return (*saved, *(grad.float().contiguous() for grad in grads))


class _TokenLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        targets = targets.contiguous()
        logprob, entropy, maximum, weight = _forward(logits, targets, temperature)
        ctx.save_for_backward(logits, targets, maximum, weight, entropy.clone())
        ctx.temperature = temperature
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        logits, targets, *saved = ctx.saved_tensors
        grad = logits.clone(memory_format=torch.contiguous_format)
        statistics = gradient_statistics(saved, grads)
        return _gradient(grad, 0, targets, ctx.temperature, statistics), None, None


class _LmHeadLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        targets = targets.contiguous()
        results = _forward_in_blocks(hidden, weight, targets, temperature)
        logprob, entropy, maximum, total = results
        ctx.save_for_backward(hidden, weight, targets, maximum, total, entropy.clone())
        # Saved tensors may come back as other objects; main_grad is an attribute of this one.
        ctx.weight, ctx.temperature = weight, temperature
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        hidden, weight, targets, *saved = ctx.saved_tensors
        statistics = gradient_statistics(saved, grads)
        buffer = main_gradient(ctx.weight)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = buffer if buffer is not None else weight.new_empty(weight.shape)
        grad_hidden = backward_in_slices(
            hidden,
            weight,
            targets,
            ctx.temperature,
            statistics,
            grad_weight,
            accumulate=buffer is not None,
            parts=chunk_count(weight.shape[0], tp_invariant=True),
        )
        returned = None if buffer is not None else grad_weight
        return grad_hidden.to(hidden.dtype), returned, None, None


def backward_in_slices(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    statistics: tuple[torch.Tensor, ...],
    grad_weight: torch.Tensor | None,
    *,
    accumulate: bool,
    parts: int,
    first: int = 0,
) -> torch.Tensor:
    """Walks over the vocabulary; fills `grad_weight` and returns dhidden in fp32.

    `weight` holds the columns from `first` on, in `parts` parts. A slice of them holds all tokens,
    so the gradient of its weight rows is complete and is written once, while the sums of dhidden
    are carried from slice to slice.
    """
    rows, vocabulary = hidden.shape[0], weight.shape[0]
    part_width = vocabulary // parts
    slices = max(1, _tile_elements(hidden) // max(1, rows) // _SLICE_GRANULE)
    width = min(part_width, slices * _SLICE_GRANULE)
    tile = hidden.new_empty(rows * width, dtype=torch.float32)
    finished: list[torch.Tensor] = []
    for part in range(parts):
        begin, end = part * part_width, (part + 1) * part_width
        total = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        for start in range(begin, end, max(1, width)):
            stop = min(start + width, end)
            rows_of_weight = weight[start:stop]
            logits = tile[: rows * (stop - start)].view(rows, stop - start)
            multiply_weight(hidden, rows_of_weight, logits)
            grad = _gradient(logits, first + start, targets, temperature, statistics)
            multiply(grad, rows_of_weight, total, mode=WRITE if start == begin else CONTINUE)
            if grad_weight is not None:
                mode = ACCUMULATE if accumulate else WRITE
                multiply(grad.t(), hidden, grad_weight[start:stop], mode=mode)
        done = part + 1
        while done % 2 == 0:
            total = finished.pop() + total
            done //= 2
        finished.append(total)
    return finished[0]
