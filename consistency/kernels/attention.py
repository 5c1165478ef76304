"""Causal attention, variable-length (learner) and paged (engine): one order of reduction."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import torch

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.kernels._arguments import (
    DTYPE_CODES,
    require_float,
    require_integer,
    require_positive,
    require_shape,
)
from consistency.kernels._autograd import once_differentiable
from consistency.kernels._dispatch import on_triton, one_device, triton_kernels, values_readable
from consistency.kernels.library import FLOAT, INT32, INT64, POINTER, Kernel, thread_count
from consistency.kernels.reductions import sum as sum_over

# Mirrors kLargestHeadDim in cpu/attention_tile.hpp.
LARGEST_HEAD_DIM = 256

_forward_kernel = Kernel(
    "lockstep_attention_forward",
    *(POINTER, INT64, INT64, POINTER, POINTER, POINTER, POINTER, INT32, POINTER, POINTER),
    *(POINTER, POINTER, POINTER, INT64, INT64, INT64),
    *(INT64, INT64, INT64, INT64, INT64, FLOAT),
    *(INT64, FLOAT, POINTER, INT32, POINTER),
)
_backward_kernel = Kernel(
    "lockstep_attention_backward",
    *(POINTER, POINTER, POINTER, POINTER, INT64, INT64, POINTER, POINTER, POINTER, POINTER),
    *(INT32, POINTER, POINTER, POINTER),
    *(POINTER, INT64, INT64, INT64, INT64, INT64, FLOAT),
    *(INT64, FLOAT, POINTER, POINTER, INT32),
)


# Mirrors kNoWindow in cpu/attention_tile.hpp.
_NO_WINDOW = 1 << 62


@dataclass(frozen=True, slots=True)
class _Masking:
    """What a query sees besides causality, and how its scores are bent; see `attention_varlen`."""

    window: int
    cap: float
    sinks: torch.Tensor | None

    @property
    def sinks_pointer(self) -> int | None:
        return None if self.sinks is None else self.sinks.data_ptr()


@dataclass(frozen=True, slots=True)
class _Pages:
    """Where the keys of each sequence lie in a paged cache."""

    block_tables: torch.Tensor
    context_lengths: torch.Tensor
    block_size: int
    blocks: int


@one_device
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """o[t] = sum over s <= t of softmax(scale q[t] . k[s]) v[s], within each sequence and head.

    Args:
        q: [T, Hq, D], float32, bfloat16 or float16, any strides.
        k: [T, Hkv, D] in the dtype of `q`; head h of q reads head h // (Hq / Hkv).
        v: [T, Hkv, D] in the dtype of `q`.
        cu_seqlens: int32 [S + 1], from 0 to T, never falling: where the sequences start and end.
        scale: the factor of the scores, usually D ** -0.5.
        window: a query at position t sees the keys t - window < s <= t; None: all s <= t.
        sinks: float32 [Hq], a logit per head that joins the softmax's denominator and no value;
            it has a gradient. None: no such logit.
        soft_cap: above 0; scores become soft_cap tanh(scale q.k / soft_cap). None: they stay.

    Returns:
        [T, Hq, D] in the dtype of `q`, contiguous.

    Raises:
        UnsupportedError: a dtype, layout or device that the kernels do not take, or D > 256.
        InvalidInputError: shapes that do not fit, cu_seqlens that do not cut [0, T), a window below
            1, or a soft_cap that is not finite and positive.

    Order of reduction:
        Keys are cut into blocks of 64 at absolute positions, taken in order with a running maximum
        in fp32. In a block, a score is one chain of fused multiply-adds over d, times the scale;
        the weights fold into their sum by index modulo 16 and into the values by one chain over
        the keys. A window begins at its first key, wherever that lies in a block; a sink joins the
        sum after the last block. A query's bits depend on its own row, its position and the keys up
        to it: the same in `attention_paged`, decode, chunked prefill and any batch. In the backward
        a thread owns a (sequence, key head): keys block by block, query rows in order in chunks of
        64. The gradient of a sink is a `sum` over the tokens.
    """
    kv_heads, head_dim = _check_queries(q, k, v, cu_seqlens, "cu_seqlens", scale)
    require_shape("k", k, (q.shape[0], kv_heads, head_dim), "tokens, key heads, head_dim")
    require_shape("v", v, k.shape, "that of k")
    cu_seqlens = cu_seqlens.contiguous()
    masking = _masking(q, window, sinks, soft_cap)
    if torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (sinks is not None and sinks.requires_grad)
    ):
        return _Attention.apply(q, k, v, sinks, cu_seqlens, scale, masking)
    return _forward(_rows(q), _rows(k), _rows(v), cu_seqlens, scale, masking, None, None)


@one_device
def attention_paged(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lengths: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """`attention_varlen` for the last positions of sequences whose keys lie in pages; no gradient.

    Args:
        q: [T, Hq, D], float32, bfloat16 or float16, any strides: the new tokens.
        k_cache: [blocks, block_size, Hkv, D] in the dtype of `q`, the new keys included; any
            block_size.
        v_cache: the shape and dtype of `k_cache`.
        block_tables: int32 [S, max_blocks]; position p of sequence s lies in block
            block_tables[s, p // block_size]. Entries beyond the context are not read.
        query_starts: int32 [S + 1], from 0 to T, never falling.
        context_lengths: int32 [S], all keys of a sequence; its queries are its last positions.
        scale, window, sinks, soft_cap: as in `attention_varlen`.

    Returns:
        [T, Hq, D] in the dtype of `q`, contiguous.

    Raises:
        UnsupportedError: a dtype, layout or device that the kernels do not take, or D > 256.
        InvalidInputError: shapes that do not fit, a context shorter than its queries or longer than
            its block table, or a block id that does not exist.

    Order of reduction:
        That of `attention_varlen`, bit for bit.
    """
    kv_heads, head_dim = _check_queries(q, k_cache, v_cache, query_starts, "query_starts", scale)
    require_float("k_cache", k_cache, 4)
    blocks, block_size = k_cache.shape[:2]
    require_shape("k_cache", k_cache, (blocks, block_size, kv_heads, head_dim), "... , head_dim")
    require_shape("v_cache", v_cache, k_cache.shape, "that of k_cache")
    require_integer("block_tables", block_tables, 2, (torch.int32,))
    require_integer("context_lengths", context_lengths, 1, (torch.int32,))
    sequences = query_starts.shape[0] - 1
    require_shape("context_lengths", context_lengths, (sequences,), "one per sequence")
    require_shape("block_tables", block_tables, (sequences, block_tables.shape[1]), "S, max_blocks")
    if block_size == 0:
        raise InvalidInputError("k_cache must have a block_size of 1 or more, got 0")
    pages = _Pages(block_tables.contiguous(), context_lengths.contiguous(), block_size, blocks)
    query_starts = query_starts.contiguous()
    masking = _masking(q, window, sinks, soft_cap)
    k_rows, v_rows = _rows(k_cache), _rows(v_cache)
    return _forward(_rows(q), k_rows, v_rows, query_starts, scale, masking, pages, None)


def _masking(
    q: torch.Tensor, window: int | None, sinks: torch.Tensor | None, soft_cap: float | None
) -> _Masking:
    if window is not None and (type(window) is not int or window < 1):
        raise InvalidInputError(f"window must be an integer of 1 or more, or None, got {window!r}")
    if sinks is not None:
        require_float("sinks", sinks, 1)
        require_shape("sinks", sinks, q.shape[1:2], "one per head of q")
        if sinks.dtype != torch.float32:
            raise UnsupportedError(f"sinks must be float32, got {sinks.dtype}: convert them")
        sinks = sinks.detach().contiguous()
    cap = 0.0 if soft_cap is None else require_positive("soft_cap", soft_cap)
    return _Masking(_NO_WINDOW if window is None else window, cap, sinks)


def _check_queries(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, name: str, scale: float
) -> tuple[int, int]:
    """Checks what both forms share; returns the key heads and the head dimension."""
    require_float("q", q, 3)
    require_float("k", k)
    require_float("v", v)
    require_integer(name, starts, 1, (torch.int32,))
    if starts.shape[0] == 0:
        raise InvalidInputError(f"{name} must have at least the entry 0, got none")
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise InvalidInputError(
            f"q, k and v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if k.dim() < 3:
        raise InvalidInputError(f"k must end in [..., key heads, head_dim], got {tuple(k.shape)}")
    query_heads, head_dim = q.shape[1:]
    kv_heads = k.shape[-2]
    if kv_heads == 0 or query_heads % kv_heads:
        raise InvalidInputError(
            f"the heads of q must be a multiple of those of k, got {query_heads} and {kv_heads}"
        )
    if not 1 <= head_dim <= LARGEST_HEAD_DIM:
        raise UnsupportedError(f"head_dim must be from 1 to {LARGEST_HEAD_DIM}, got {head_dim}")
    if not math.isfinite(scale):
        raise InvalidInputError(f"scale must be finite, got {scale}")
    return kv_heads, head_dim


def _rows(x: torch.Tensor) -> torch.Tensor:
    """The kernels take any strides but that of the last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(x: torch.Tensor) -> Any:
    """Strides (block, token, head) of keys or values; without pages the block's is unused."""
    outer = (0, *x.stride()[:2]) if x.dim() == 3 else x.stride()[:3]
    return (ctypes.c_int64 * 3)(*outer)


def _mask_on_gpu(masking: _Masking) -> Any:
    return triton_kernels("attention").Mask(
        window=None if masking.window == _NO_WINDOW else masking.window,
        sinks=masking.sinks,
        soft_cap=masking.cap or None,
    )


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    scale: float,
    masking: _Masking,
    pages: _Pages | None,
    log_sums: torch.Tensor | None,
) -> torch.Tensor:
    if on_triton(q):
        kernels = triton_kernels("attention")
        if values_readable(starts):
            found = kernels.first_fault(starts, q.shape[0], pages)
            if found >= 0:
                raise InvalidInputError(_explain(found, q.shape[0], starts, pages))
        mask = _mask_on_gpu(masking)
        return kernels.forward(q, k, v, starts, scale, pages, log_sums, mask)
    out = torch.empty(q.shape, dtype=q.dtype)
    fault = ctypes.c_int64(-1)
    _forward_kernel(
        q.data_ptr(),
        q.stride(0),
        q.stride(1),
        k.data_ptr(),
        _strides(k),
        v.data_ptr(),
        _strides(v),
        DTYPE_CODES[q.dtype],
        out.data_ptr(),
        None if log_sums is None else log_sums.data_ptr(),
        starts.data_ptr(),
        None if pages is None else pages.context_lengths.data_ptr(),
        None if pages is None else pages.block_tables.data_ptr(),
        0 if pages is None else pages.block_tables.shape[1],
        1 if pages is None else pages.block_size,
        0 if pages is None else pages.blocks,
        starts.shape[0] - 1,
        q.shape[0],
        q.shape[1],
        k.shape[-2],
        q.shape[2],
        scale,
        masking.window,
        masking.cap,
        masking.sinks_pointer,
        thread_count(),
        ctypes.addressof(fault),
    )
    if fault.value >= 0:
        raise InvalidInputError(_explain(fault.value, q.shape[0], starts, pages))
    return out


def _explain(fault: int, tokens: int, starts: torch.Tensor, pages: _Pages | None) -> str:
    sequence, reason = divmod(fault, 4)
    if reason == 0 or pages is None:
        name = "cu_seqlens" if pages is None else "query_starts"
        return (
            f"{name} must run from 0 to the {tokens} rows of q and never fall, "
            f"got {starts.tolist()}"
        )
    context = int(pages.context_lengths[sequence])
    if reason == 1:
        queries = int(starts[sequence + 1] - starts[sequence])
        return (
            f"context_lengths[{sequence}] is {context}, less than its {queries} queries: it counts "
            "the cached and the new keys"
        )
    if reason == 2:
        width = pages.block_tables.shape[1]
        return (
            f"context_lengths[{sequence}] is {context}, more than the {width} blocks of "
            f"{pages.block_size} in block_tables[{sequence}] hold"
        )
    return (
        f"block_tables[{sequence}] is {pages.block_tables[sequence].tolist()}; the ids of its "
        f"first {-(-context // pages.block_size)} blocks must be from 0 to {pages.blocks - 1}"
    )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        cu_seqlens: torch.Tensor,
        scale: float,
        masking: _Masking,
    ) -> torch.Tensor:
        q, k, v = _rows(q), _rows(k), _rows(v)
        log_sums = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        out = _forward(q, k, v, cu_seqlens, scale, masking, None, log_sums)
        ctx.masking = masking
        ctx.save_for_backward(q, k, v, cu_seqlens, out, log_sums)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v, cu_seqlens, out, log_sums = ctx.saved_tensors
        grad = grad.contiguous()
        masking: _Masking = ctx.masking
        if on_triton(q):
            grads = triton_kernels("attention_backward").backward(
                grad, q, k, v, cu_seqlens, out, log_sums, ctx.scale, _mask_on_gpu(masking)
            )
            return *grads, None, None, None
        sink_terms = None if masking.sinks is None else torch.empty_like(log_sums)
        grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
        _backward_kernel(
            grad.data_ptr(),
            out.data_ptr(),
            log_sums.data_ptr(),
            q.data_ptr(),
            q.stride(0),
            q.stride(1),
            k.data_ptr(),
            _strides(k),
            v.data_ptr(),
            _strides(v),
            DTYPE_CODES[q.dtype],
            grad_q.data_ptr(),
            grad_k.data_ptr(),
            grad_v.data_ptr(),
            cu_seqlens.data_ptr(),
            cu_seqlens.shape[0] - 1,
            q.shape[0],
            q.shape[1],
            k.shape[1],
            q.shape[2],
            ctx.scale,
            masking.window,
            masking.cap,
            masking.sinks_pointer,
            None if sink_terms is None else sink_terms.data_ptr(),
            thread_count(),
        )
        grad_sinks = None if sink_terms is None else sum_over(sink_terms, 0)
        return grad_q, grad_k, grad_v, grad_sinks, None, None, None
