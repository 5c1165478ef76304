"""top_k: the k largest of each row, with ties to the lowest index."""

from __future__ import annotations

import ctypes

import torch

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.kernels._arguments import require_float
from consistency.kernels._dispatch import on_triton, one_device, triton_kernels, values_readable
from consistency.kernels.library import INT32, INT64, POINTER, Kernel, thread_count

_top_k_kernel = Kernel(
    "lockstep_top_k", POINTER, INT64, INT64, INT64, POINTER, POINTER, INT32, POINTER
)


@one_device
def top_k(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest entries of each row in descending order; of equal ones the lowest index first.

    Args:
        scores: float32 [T, E], any strides; -inf and +inf are ordinary values.
        k: from 0 to E.

    Returns:
        values: float32 [T, k]; a gradient flows back to the entries that were taken.
        ids: int64 [T, k].

    Raises:
        UnsupportedError: a dtype, layout or device that the kernels do not take.
        InvalidInputError: a NaN, which has no place in the order, or a k that does not fit.

    Order of reduction:
        None: the order (value descending, index ascending) is total, so the answer is unique.
    """
    require_float("scores", scores, 2)
    if scores.dtype != torch.float32:
        raise UnsupportedError(f"scores must be float32, got {scores.dtype}: convert it")
    if not 0 <= k <= scores.shape[1]:
        raise InvalidInputError(
            f"k must be from 0 to the {scores.shape[1]} entries of a row, got {k}"
        )
    rows = scores.detach().contiguous()
    if on_triton(rows):
        values, ids = _on_gpu(rows, k)
        if torch.is_grad_enabled() and scores.requires_grad:
            values = scores.gather(1, ids)
        return values, ids
    values = torch.empty((scores.shape[0], k), dtype=torch.float32)
    ids = torch.empty((scores.shape[0], k), dtype=torch.int64)
    fault = ctypes.c_int64(-1)
    _top_k_kernel(
        rows.data_ptr(),
        *rows.shape,
        k,
        values.data_ptr(),
        ids.data_ptr(),
        thread_count(),
        ctypes.addressof(fault),
    )
    if fault.value >= 0:
        raise InvalidInputError(f"scores[{fault.value}] holds a NaN, which cannot be ordered")
    if torch.is_grad_enabled() and scores.requires_grad:
        values = scores.gather(1, ids)
    return values, ids


def _on_gpu(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    if values_readable(scores):
        broken = scores.isnan().any(1)
        if bool(broken.any()):
            row = int(broken.nonzero()[0])
            raise InvalidInputError(f"scores[{row}] holds a NaN, which cannot be ordered")
    return triton_kernels("routing").top_k(scores, k)
