"""moe_experts: the experts of a mixture-of-experts layer, from routed tokens to their outputs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.kernels._arguments import (
    DTYPE_CODES,
    output_dtype_code,
    require_float,
    require_indices,
    require_integer,
    require_shape,
)
from consistency.kernels._autograd import once_differentiable
from consistency.kernels._dispatch import on_triton, one_device, triton_kernels
from consistency.kernels.grouped import grouped_linear
from consistency.kernels.library import INT32, INT64, POINTER, Kernel, thread_count
from consistency.kernels.silu_and_mul import silu_and_mul

GroupedProduct = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_sort_kernel = Kernel("lockstep_expert_sort", POINTER, INT64, INT64, POINTER, POINTER, POINTER)
_dispatch_kernel = Kernel(
    "lockstep_expert_dispatch", POINTER, POINTER, POINTER, INT64, INT64, INT64, INT32
)
_combine_kernel = Kernel(
    "lockstep_expert_combine",
    *(POINTER, INT32, POINTER, POINTER, POINTER, INT32, INT64, INT64, INT64, INT32),
)
_combine_backward_kernel = Kernel(
    "lockstep_expert_combine_backward",
    *(POINTER, INT32, POINTER, INT32, POINTER, POINTER, POINTER, POINTER),
    *(INT64, INT64, INT64, INT32),
)


@one_device
def moe_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    tp_invariant: bool = False,
) -> torch.Tensor:
    """y[t] = sum over slots s of weights[t, s] down[e] silu_and_mul(gate_up[e] x[t]).

    The expert of slot s is e = ids[t, s].

    Args:
        x: [T, H], float32, bfloat16 or float16.
        gate_up: [E, 2 I, H]: gate rows, then up rows. With an attribute `main_grad` (float32, same
            shape) its gradient is added there and autograd receives None; so too for `down`.
        down: [E, H, I].
        weights: float32 [T, k], from `route`; a gradient flows back to them.
        ids: int64 [T, k], from `route`.
        tp_invariant: cut the reductions of both products into chunks, as in `linear`.

    Returns:
        [T, H] in the dtype of `x`.

    Raises:
        UnsupportedError: a dtype, layout or device that the kernels do not take.
        InvalidInputError: shapes that do not fit, or an id outside [0, E).

    Order of reduction:
        Both products are `grouped_linear`. The activation is rounded to the dtype of `x` after the
        first product and after `silu_and_mul`; the second product stays in fp32. A token's expert
        outputs are combined in slot order by fused multiply-adds in fp32, with one rounding. The
        order of tokens among an expert's rows changes no bit, so neither does the batch.
    """
    require_float("gate_up", gate_up, 3)
    require_float("down", down, 3)
    return routed_experts(
        x,
        weights,
        ids,
        gate_up.shape,
        down.shape,
        lambda rows, offsets: grouped_linear(rows, gate_up, offsets, tp_invariant=tp_invariant),
        lambda hidden, offsets: grouped_linear(
            hidden, down, offsets, out_dtype=torch.float32, tp_invariant=tp_invariant
        ),
    )


def routed_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up_shape: Sequence[int],
    down_shape: Sequence[int],
    gate_up: GroupedProduct,
    down: GroupedProduct,
) -> torch.Tensor:
    """`moe_experts` for any pair of grouped products of the given weight shapes.

    Args:
        x, weights, ids: as in `moe_experts`.
        gate_up_shape, down_shape: [E, 2 I, H] and [E, H, I].
        gate_up: rows [R, H] and offsets [E + 1] to [R, 2 I], in the dtype of the rows.
        down: rows [R, I] and offsets to [R, H], float32.
    """
    _check(x, gate_up_shape, down_shape, weights, ids)
    place, offsets = _sort_by_expert(ids.contiguous(), gate_up_shape[0])
    rows = _Dispatch.apply(x, place, weights.shape[1])
    outputs = down(silu_and_mul(gate_up(rows, offsets)), offsets)
    return _Combine.apply(outputs, weights, place, x.dtype).view(x.shape)


@one_device
def moe_permute(
    x: torch.Tensor, ids: torch.Tensor, experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copies each token's row once per slot, the rows of an expert together.

    Args:
        x: [T, H], float32, bfloat16 or float16.
        ids: int64 [T, k], the expert of each slot.
        experts: the number of experts E.

    Returns:
        (rows, place, offsets): rows [T k, H] in the dtype of `x`; place int64 [T, k], where the row
        of a slot went; offsets int64 [E + 1], where the rows of an expert begin and end.

    Raises:
        UnsupportedError: a dtype, layout or device that the kernels do not take.
        InvalidInputError: shapes that do not fit, or an id outside [0, experts).

    Order of reduction:
        None forward. dx adds the rows of a token in slot order, in fp32, with one rounding.
    """
    require_float("x", x, 2)
    require_integer("ids", ids, 2)
    require_shape("ids", ids, (x.shape[0], ids.shape[1]), "tokens, slots")
    place, offsets = _sort_by_expert(ids.contiguous(), experts)
    return _Dispatch.apply(x, place, ids.shape[1]), place, offsets


@one_device
def moe_combine(
    outputs: torch.Tensor, weights: torch.Tensor, place: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """y[t] = sum over slots s, in order, of weights[t, s] outputs[place[t, s]].

    Args:
        outputs: [T k, H], the experts' outputs in the order of `moe_permute`, best float32.
        weights: float32 [T, k].
        place: int64 [T, k], from `moe_permute`.
        dtype: dtype of the result.

    Returns:
        [T, H] in `dtype`.

    Raises:
        UnsupportedError: a dtype, layout or device that the kernels do not take.
        InvalidInputError: shapes that do not fit, or a place outside `outputs`.

    Order of reduction:
        Fused multiply-adds in slot order, in fp32, with one rounding; never atomics. Which process
        computed an expert does not enter.
    """
    require_float("outputs", outputs, 2)
    require_float("weights", weights, 2)
    require_integer("place", place, 2)
    require_shape("place", place, weights.shape, "that of weights")
    require_indices("place", place, outputs.shape[0], "the rows of outputs")
    if weights.dtype != torch.float32:
        raise UnsupportedError(f"weights must be float32 (see route), got {weights.dtype}")
    output_dtype_code(dtype)
    return _Combine.apply(outputs.contiguous(), weights, place.contiguous(), dtype)


def _check(
    x: torch.Tensor,
    gate_up: Sequence[int],
    down: Sequence[int],
    weights: torch.Tensor,
    ids: torch.Tensor,
) -> None:
    require_float("x", x, 2)
    require_float("weights", weights, 2)
    require_integer("ids", ids, 2)
    experts, twice, width = gate_up
    if twice % 2:
        raise InvalidInputError(f"gate_up must have an even shape[1], got {tuple(gate_up)}")
    require_shape("x", x, (x.shape[0], width), "tokens, the input width of gate_up")
    if tuple(down) != (experts, width, twice // 2):
        raise InvalidInputError(
            f"down must have shape {(experts, width, twice // 2)} (the transpose of half of "
            f"gate_up), got {tuple(down)}"
        )
    require_shape("weights", weights, (x.shape[0], weights.shape[1]), "tokens, slots")
    require_shape("ids", ids, weights.shape, "that of weights")
    if weights.dtype != torch.float32:
        raise UnsupportedError(f"weights must be float32 (see route), got {weights.dtype}")


def _sort_by_expert(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Stable sort of the pairs (token, slot) by expert: each pair's place, each expert's offset."""
    if on_triton(ids):
        require_indices("ids", ids, experts, "the experts")
        return triton_kernels("moe").sort_by_expert(ids, experts)
    place = torch.empty(ids.shape, dtype=torch.int64)
    offsets = torch.empty(experts + 1, dtype=torch.int64)
    fault = ctypes.c_int64(-1)
    _sort_kernel(
        ids.data_ptr(),
        ids.numel(),
        experts,
        offsets.data_ptr(),
        place.data_ptr(),
        ctypes.addressof(fault),
    )
    if fault.value >= 0:
        token, slot = divmod(fault.value, ids.shape[1])
        raise InvalidInputError(
            f"ids[{token}, {slot}] is {int(ids[token, slot])}; ids must be from 0 to {experts - 1}"
        )
    return place, offsets


def _combine(
    y: torch.Tensor, place: torch.Tensor, weights: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """out[t] = sum over s, in order, of weights[t, s] y[place[t, s]]; no weights: a plain sum."""
    if on_triton(y):
        return triton_kernels("moe").combine(y, place, weights, dtype)
    out = torch.empty((place.shape[0], y.shape[1]), dtype=dtype)
    _combine_kernel(
        y.data_ptr(),
        DTYPE_CODES[y.dtype],
        place.data_ptr(),
        None if weights is None else weights.data_ptr(),
        out.data_ptr(),
        DTYPE_CODES[dtype],
        *place.shape,
        y.shape[1],
        thread_count(),
    )
    return out


class _Dispatch(torch.autograd.Function):
    """Copies each token's row to its experts' places; the backward adds them in slot order."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, place: torch.Tensor, slots: int) -> torch.Tensor:
        ctx.save_for_backward(place)
        x = x.contiguous()
        if on_triton(x):
            return triton_kernels("moe").dispatch(x, place, slots)
        rows = torch.empty((x.shape[0] * slots, x.shape[1]), dtype=x.dtype)
        _dispatch_kernel(
            x.data_ptr(),
            place.data_ptr(),
            rows.data_ptr(),
            x.shape[0],
            slots,
            x.shape[1] * x.element_size(),
            thread_count(),
        )
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (place,) = ctx.saved_tensors
        return _combine(grad.contiguous(), place, None, grad.dtype), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        outputs: torch.Tensor,
        weights: torch.Tensor,
        place: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        weights = weights.contiguous()
        ctx.save_for_backward(outputs, weights, place)
        return _combine(outputs, place, weights, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        outputs, weights, place = ctx.saved_tensors
        grad = grad.contiguous()
        if on_triton(grad):
            kernels = triton_kernels("moe")
            return *kernels.combine_backward(grad, outputs, place, weights), None, None
        grad_outputs = torch.empty_like(outputs)
        grad_weights = torch.empty_like(weights)
        _combine_backward_kernel(
            grad.data_ptr(),
            DTYPE_CODES[grad.dtype],
            outputs.data_ptr(),
            DTYPE_CODES[outputs.dtype],
            place.data_ptr(),
            weights.data_ptr(),
            grad_outputs.data_ptr(),
            grad_weights.data_ptr(),
            *place.shape,
            outputs.shape[1],
            thread_count(),
        )
        return grad_outputs, grad_weights, None, None
