"""route: the experts of each token and their weights, chosen by the router or replayed."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.kernels._arguments import require_float, require_shape
from consistency.kernels._autograd import once_differentiable
from consistency.kernels._dispatch import on_triton, one_device, triton_kernels, values_readable
from consistency.kernels.library import INT32, INT64, POINTER, Kernel, thread_count

_forward_kernel = Kernel(
    "lockstep_route_forward",
    *(POINTER, POINTER, POINTER, POINTER, INT64, INT64, INT64, INT32, INT32, INT32, POINTER),
)
_backward_kernel = Kernel(
    "lockstep_route_backward",
    *(POINTER, POINTER, POINTER, POINTER, INT64, INT64, INT64, INT32, INT32),
)


@one_device
def route(
    router_logits: torch.Tensor,
    k: int,
    *,
    normalise: bool = True,
    replay_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """weights = softmax(router_logits) gathered at the top k experts, or at `replay_ids`.

    The probabilities are taken over all experts and gathered from the full row, so that gradients
    reach every logit whether the ids are live or replayed.

    Args:
        router_logits: float32 [T, E], any strides.
        k: experts per token, from 1 to E.
        normalise: divide the k weights of a token by their sum.
        replay_ids: integers [T, k], the experts of each token in slot order; None for the k most
            probable, ties to the lowest id.

    Returns:
        weights: float32 [T, k].
        ids: int64 [T, k].

    Raises:
        UnsupportedError: a dtype, layout or device that the kernels do not take.
        InvalidInputError: a row of logits without a softmax (NaN, +inf, only -inf); a replayed id
            out of range or twice in a row; replayed experts that all have probability 0 where a
            normalisation was asked for; a k or shapes that do not fit.

    Order of reduction:
        The softmax is `softmax`; the sum that normalises runs in slot order; all in fp32.
    """
    require_float("router_logits", router_logits, 2)
    if router_logits.dtype != torch.float32:
        raise UnsupportedError(
            f"router_logits must be float32 (the gate runs in fp32), got {router_logits.dtype}"
        )
    tokens, experts = router_logits.shape
    if not 1 <= k <= experts:
        raise InvalidInputError(f"k must be from 1 to the {experts} experts, got {k}")
    if replay_ids is not None:
        replay_ids = _checked_ids(replay_ids, tokens, k)
    if torch.is_grad_enabled() and router_logits.requires_grad:
        return _Route.apply(router_logits, k, normalise, replay_ids)
    weights, ids, _ = _forward(router_logits, k, normalise, replay_ids)
    return weights, ids


def _checked_ids(ids: torch.Tensor, tokens: int, k: int) -> torch.Tensor:
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise UnsupportedError(f"replay_ids must be integers, got {ids.dtype}")
    require_shape("replay_ids", ids, (tokens, k), "tokens, k")
    return ids.to(torch.int64).contiguous()


def _forward(
    logits: torch.Tensor, k: int, normalise: bool, replay_ids: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = logits.contiguous()
    if on_triton(logits):
        weights, ids, probabilities, faults = triton_kernels("routing").route(
            logits, k, normalise, replay_ids
        )
        if values_readable(faults) and bool((faults >= 0).any()):
            row = int((faults >= 0).nonzero()[0])
            raise InvalidInputError(_explain(row * 4 + int(faults[row]), probabilities, ids))
        return weights, ids, probabilities
    probabilities = torch.empty(logits.shape, dtype=torch.float32)
    ids = replay_ids
    if ids is None:
        ids = torch.empty((logits.shape[0], k), dtype=torch.int64)
    weights = torch.empty(ids.shape, dtype=torch.float32)
    fault = ctypes.c_int64(-1)
    _forward_kernel(
        logits.data_ptr(),
        probabilities.data_ptr(),
        ids.data_ptr(),
        weights.data_ptr(),
        *logits.shape,
        k,
        replay_ids is not None,
        normalise,
        thread_count(),
        ctypes.addressof(fault),
    )
    if fault.value >= 0:
        raise InvalidInputError(_explain(fault.value, probabilities, ids))
    return weights, ids, probabilities


def _explain(fault: int, probabilities: torch.Tensor, ids: torch.Tensor) -> str:
    row, reason = divmod(fault, 4)
    if reason == 3:
        return f"router_logits[{row}] holds a NaN or +inf, or only -inf: its softmax is undefined"
    listed = ids[row].tolist()
    if reason == 0:
        return f"replay_ids[{row}] is {listed}; ids must be from 0 to {probabilities.shape[1] - 1}"
    if reason == 1:
        return f"replay_ids[{row}] is {listed}: an expert appears twice"
    return (
        f"replay_ids[{row}] is {listed}: every one of these experts has probability 0, so their "
        "weights cannot be normalised; the trace belongs to another model or other weights"
    )


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        k: int,
        normalise: bool,
        replay_ids: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids, probabilities = _forward(logits, k, normalise, replay_ids)
        if ids is replay_ids:
            ids = ids.clone()
        ctx.save_for_backward(probabilities, ids)
        ctx.normalise = normalise
        ctx.mark_non_differentiable(ids)
        return weights, ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        probabilities, ids = ctx.saved_tensors
        grad = grad.contiguous()
        if on_triton(grad):
            kernels = triton_kernels("routing")
            grad_logits = kernels.route_backward(grad, probabilities, ids, ctx.normalise)
            return grad_logits, None, None, None
        grad_logits = torch.empty_like(probabilities)
        _backward_kernel(
            grad.data_ptr(),
            probabilities.data_ptr(),
            ids.data_ptr(),
            grad_logits.data_ptr(),
            *probabilities.shape,
            ids.shape[1],
            ctx.normalise,
            thread_count(),
        )
        return grad_logits, None, None, None
