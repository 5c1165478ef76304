"""The one door from Python to the matrix products of cpu/gemm.cpp, for operands of any strides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from consistency.errors import InvalidInputError
from consistency.kernels._arguments import DTYPE_CODES
from consistency.kernels.library import INT32, INT64, POINTER, Kernel, thread_count

if TYPE_CHECKING:
    import torch

# Mirrors Mode in cpu/gemm.hpp.
WRITE = 0
ACCUMULATE = 1
CONTINUE = 2

_OPERAND = (POINTER, INT64, INT64, INT32)

_gemm = Kernel(
    "lockstep_gemm",
    *(INT64, INT64, INT64),
    *_OPERAND,
    *_OPERAND,
    *(POINTER, INT32),
    *_OPERAND,
    *(INT64, INT32, INT32),
)
_grouped_rows = Kernel(
    "lockstep_grouped_rows",
    *(INT64, POINTER, INT64, INT64),
    *_OPERAND,
    *(POINTER, INT64, INT64, INT64, INT32),
    *_OPERAND,
    *(INT64, INT32),
)
_grouped_steps = Kernel(
    "lockstep_grouped_steps",
    *(INT64, POINTER, INT64, INT64),
    *_OPERAND,
    *_OPERAND,
    *(POINTER, INT64, INT64, INT64, INT32),
    *(INT32, INT32),
)


def chunk_count(reduction: int, tp_invariant: bool) -> int:
    """The number of chunks into which a reduction of this length is cut: a function of it alone.

    With `tp_invariant`, the largest power of two C <= 8 with reduction % (64 C) == 0, else 1;
    without, 1.
    """
    if tp_invariant and reduction > 0:
        for chunks in (8, 4, 2):
            if reduction % (64 * chunks) == 0:
                return chunks
    return 1


def require_chunks(chunks: int, reduction: int) -> None:
    """Raises unless a reduction of this length can be cut into `chunks` equal parts."""
    if chunks < 1 or chunks & (chunks - 1) or reduction % chunks:
        raise InvalidInputError(
            f"chunks must be a power of two that divides the reduction length {reduction}, "
            f"got {chunks}"
        )


def multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    chunks: int = 1,
    mode: int = WRITE,
) -> torch.Tensor:
    """out = a @ b + bias for checked 2-D operands; see cpu/gemm.hpp for modes and the order."""
    m, k = a.shape
    n = b.shape[1]
    a_row, a_column = a.stride()
    b_row, b_column = b.stride()
    out_row, out_column = out.stride()
    codes = DTYPE_CODES
    _gemm(
        m,
        n,
        k,
        a.data_ptr(),
        a_row,
        a_column,
        codes[a.dtype],
        b.data_ptr(),
        b_row,
        b_column,
        codes[b.dtype],
        None if bias is None else bias.data_ptr(),
        0 if bias is None else codes[bias.dtype],
        out.data_ptr(),
        out_row,
        out_column,
        codes[out.dtype],
        chunks,
        mode,
        thread_count(),
    )
    return out


def multiply_grouped_rows(
    a: torch.Tensor, offsets: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, chunks: int = 1
) -> torch.Tensor:
    """out[rows of g] = a[rows of g] @ b[g] for checked a [T, K], b [G, K, N], out [T, N]."""
    codes = DTYPE_CODES
    groups, k, n = b.shape
    _grouped_rows(
        groups,
        offsets.data_ptr(),
        n,
        k,
        a.data_ptr(),
        *a.stride(),
        codes[a.dtype],
        b.data_ptr(),
        *b.stride(),
        codes[b.dtype],
        out.data_ptr(),
        *out.stride(),
        codes[out.dtype],
        chunks,
        thread_count(),
    )
    return out


def multiply_grouped_steps(
    a: torch.Tensor, offsets: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, mode: int = WRITE
) -> torch.Tensor:
    """out[g] = a[:, steps of g] @ b[steps of g] for checked a [M, T], b [T, N], out [G, M, N]."""
    codes = DTYPE_CODES
    groups, m, n = out.shape
    _grouped_steps(
        groups,
        offsets.data_ptr(),
        m,
        n,
        a.data_ptr(),
        *a.stride(),
        codes[a.dtype],
        b.data_ptr(),
        *b.stride(),
        codes[b.dtype],
        out.data_ptr(),
        *out.stride(),
        codes[out.dtype],
        mode,
        thread_count(),
    )
    return out
