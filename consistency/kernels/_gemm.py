"""The one door to the matrix products of cpu/gemm.cpp and triton/gemm.py, for any strides."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from consistency.errors import InvalidInputError
from consistency.kernels._arguments import DTYPE_CODES
from consistency.kernels._dispatch import on_triton, triton_kernels
from consistency.kernels.library import POINTER, Kernel, thread_count

if TYPE_CHECKING:
    import torch

# Mirrors Mode in cpu/gemm.hpp.
WRITE = 0
ACCUMULATE = 1
CONTINUE = 2

# Mirror the request structs at the end of cpu/gemm.cpp: eight-byte fields, pointers included.
_pack_gemm = struct.Struct("=20q").pack
_pack_grouped_rows = struct.Struct("=19q").pack
_pack_grouped_steps = struct.Struct("=19q").pack

_pack_batched = struct.Struct("=21q").pack

_batched = Kernel("lockstep_batched_gemm", POINTER)
_gemm = Kernel("lockstep_gemm", POINTER)
_grouped_rows = Kernel("lockstep_grouped_rows", POINTER)
_grouped_steps = Kernel("lockstep_grouped_steps", POINTER)


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
    if on_triton(out):
        return triton_kernels("gemm").multiply(a, b, out, bias=bias, chunks=chunks, mode=mode)
    row, column = b.stride()
    _run(a, b, row, column, b.shape[1], out, bias, chunks, mode)
    return out


def multiply_weight(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    chunks: int = 1,
) -> torch.Tensor:
    """out = x @ weight^T + bias; `multiply` without the cost of a transposed view."""
    if on_triton(out):
        kernels = triton_kernels("gemm")
        return kernels.multiply(x, weight.t(), out, bias=bias, chunks=chunks)
    row, column = weight.stride()
    _run(x, weight, column, row, weight.shape[0], out, bias, chunks, WRITE)
    return out


def _run(
    a: torch.Tensor,
    b: torch.Tensor,
    b_row: int,
    b_column: int,
    n: int,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    chunks: int,
    mode: int,
) -> None:
    codes = DTYPE_CODES
    m, k = a.shape
    _gemm(
        _pack_gemm(
            *(m, n, k),
            *(a.data_ptr(), *a.stride(), codes[a.dtype]),
            *(b.data_ptr(), b_row, b_column, codes[b.dtype]),
            *((0, 0) if bias is None else (bias.data_ptr(), codes[bias.dtype])),
            *(out.data_ptr(), *out.stride(), codes[out.dtype]),
            *(chunks, mode, thread_count()),
        )
    )


def multiply_batched(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, chunks: int = 1
) -> torch.Tensor:
    """out[i] = a[i] @ b[i] for checked a [B, M, K], b [B, K, N], out [B, M, N]."""
    if on_triton(out):
        return triton_kernels("gemm").multiply(a, b, out, chunks=chunks)
    codes = DTYPE_CODES
    batches, m, k = a.shape
    _batched(
        _pack_batched(
            *(batches, m, b.shape[2], k),
            *(a.data_ptr(), *a.stride()[1:], codes[a.dtype]),
            *(b.data_ptr(), *b.stride()[1:], codes[b.dtype]),
            *(out.data_ptr(), *out.stride()[1:], codes[out.dtype]),
            *(a.stride(0), b.stride(0), out.stride(0)),
            *(chunks, thread_count()),
        )
    )
    return out


def multiply_grouped_rows(
    a: torch.Tensor, offsets: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, chunks: int = 1
) -> torch.Tensor:
    """out[rows of g] = a[rows of g] @ b[g] for checked a [T, K], b [G, K, N], out [T, N]."""
    if on_triton(out):
        return triton_kernels("grouped").multiply_grouped_rows(a, offsets, b, out, chunks=chunks)
    codes = DTYPE_CODES
    groups, k, n = b.shape
    group, row, column = b.stride()
    _grouped_rows(
        _pack_grouped_rows(
            *(groups, offsets.data_ptr(), n, k),
            *(a.data_ptr(), *a.stride(), codes[a.dtype]),
            *(b.data_ptr(), row, column, codes[b.dtype], group),
            *(out.data_ptr(), *out.stride(), codes[out.dtype]),
            *(chunks, thread_count()),
        )
    )
    return out


def multiply_grouped_steps(
    a: torch.Tensor, offsets: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, mode: int = WRITE
) -> torch.Tensor:
    """out[g] = a[:, steps of g] @ b[steps of g] for checked a [M, T], b [T, N], out [G, M, N]."""
    if on_triton(out):
        return triton_kernels("grouped").multiply_grouped_steps(a, offsets, b, out, mode=mode)
    codes = DTYPE_CODES
    groups, m, n = out.shape
    group, row, column = out.stride()
    _grouped_steps(
        _pack_grouped_steps(
            *(groups, offsets.data_ptr(), m, n),
            *(a.data_ptr(), *a.stride(), codes[a.dtype]),
            *(b.data_ptr(), *b.stride(), codes[b.dtype]),
            *(out.data_ptr(), row, column, codes[out.dtype], group),
            *(mode, thread_count()),
        )
    )
    return out
