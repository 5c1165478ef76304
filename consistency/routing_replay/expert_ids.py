"""Expert ids as tensors: the smallest dtype that holds them, and the checks that every use needs.

Ids stay in their narrow dtype throughout. The traces of one job may fill tens of gigabytes;
promoted to int64 they fill eight times as many, so checks work on views and on narrow temporaries.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from consistency.errors import InvalidInputError, RoutingTraceError

MAX_EXPERTS: Final = 1 << 16

_INTEGER: Final = (
    torch.uint8,
    torch.uint16,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
)


def expert_dtype(experts: int) -> torch.dtype:
    """Smallest unsigned dtype that holds the ids 0 .. experts - 1: uint8 up to 256, else uint16."""
    if type(experts) is not int or not 1 <= experts <= MAX_EXPERTS:
        raise RoutingTraceError(f"experts is {experts!r}: use 1 to {MAX_EXPERTS}")
    return torch.uint8 if experts <= 256 else torch.uint16


def require_integer(name: str, ids: Tensor) -> None:
    """Raises `InvalidInputError` unless ``ids`` is a tensor of an integer dtype."""
    if not isinstance(ids, Tensor) or ids.dtype not in _INTEGER:
        found = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise InvalidInputError(f"{name} is {found}: use an integer tensor")


def sortable(ids: Tensor) -> Tensor:
    """The same ids in a dtype that every device sorts: uint16 as an order-preserving int16 view."""
    if ids.dtype != torch.uint16:
        return ids
    # Flipping the top bit maps 0 .. 65535 onto -32768 .. 32767 in order, without widening.
    return ids.contiguous().view(torch.int16).bitwise_xor(-32768)


def narrow(ids: Tensor, experts: int) -> Tensor:
    """``ids`` in `expert_dtype`, checked first, so that a conversion never wraps 300 to 44.

    Args:
        ids: any integer dtype, any shape.
        experts: number of experts.

    Raises:
        InvalidInputError: not an integer tensor.
        RoutingTraceError: an id outside 0 .. experts - 1.
    """
    require_integer("ids", ids)
    dtype = expert_dtype(experts)
    if ids.numel():
        low, high = _range(ids)
        if low < 0 or high >= experts:
            raise RoutingTraceError(
                f"expert ids run from {low} to {high}: use 0 to {experts - 1}, and mark tokens "
                "without a routing as invalid instead of giving them a placeholder id"
            )
    return ids.to(dtype)


def require_routable(ids: Tensor, valid: Tensor, experts: int) -> None:
    """Checks that every valid row names ``topk`` different experts that exist.

    Args:
        ids: ``[tokens, layers, topk]``, uint8 or uint16.
        valid: bool ``[tokens]``; the other tokens' rows may hold anything.
        experts: number of experts.

    Raises:
        RoutingTraceError: names the first token and layer at fault and the ids found there.
    """
    if ids.numel() == 0:
        return
    ordered = sortable(ids).sort(dim=-1).values
    offset = 32768 if ids.dtype == torch.uint16 else 0
    # The largest id of a row is last after sorting; compare with experts - 1, which fits the dtype.
    outside = ordered[..., -1] > experts - 1 - offset
    fault = outside & valid[:, None]
    if bool(fault.any()):
        token, layer = fault.nonzero()[0].tolist()
        raise RoutingTraceError(
            f"token {token}, row {layer} of layers: expert ids {_row(ids, token, layer)} with only "
            f"{experts} experts: the trace belongs to another model"
        )
    repeated = (ordered[..., 1:] == ordered[..., :-1]).any(dim=-1)
    fault = repeated & valid[:, None]
    if bool(fault.any()):
        token, layer = fault.nonzero()[0].tolist()
        row = _row(ids, token, layer)
        hint = (
            "the row was never written; mark its token invalid"
            if not any(row)
            else "a router picks each expert once per token"
        )
        raise RoutingTraceError(
            f"token {token}, row {layer} of layers: expert ids {row} repeat an expert: {hint}"
        )


def _range(ids: Tensor) -> tuple[int, int]:
    if ids.dtype == torch.uint16:
        low, high = torch.aminmax(sortable(ids))
        return int(low) + 32768, int(high) + 32768
    low, high = torch.aminmax(ids)
    return int(low), int(high)


def _row(ids: Tensor, token: int, layer: int) -> list[int]:
    return ids[token, layer].to(torch.int64).tolist()
