"""Reward shaping by length."""

from __future__ import annotations

import torch
from torch import Tensor

from consistency.errors import InvalidInputError


def overlong_penalty(
    lengths: Tensor,
    *,
    max_length: int,
    cache_length: int,
    factor: float = 1.0,
    floor: bool = True,
) -> Tensor:
    """DAPO's soft punishment, added to the reward of a response of length n.

        0                                       n <= max_length - cache_length
        (max_length - cache_length - n) / cache_length * factor    up to max_length
        -factor                                 beyond, as in the paper

    Args:
        lengths: integer ``[B]``, tokens of each response.
        max_length: longest response, L_max.
        cache_length: width of the ramp, 0 < L_cache <= L_max.
        factor: size of the full penalty, > 0.
        floor: stop at ``-factor`` (paper); False lets the ramp go on, as public code does.

    Returns:
        fp32 ``[B]``, <= 0.

    Raises:
        InvalidInputError: lengths that do not fit together.
    """
    if not 0 < cache_length <= max_length or not factor > 0:
        raise InvalidInputError(
            f"max_length is {max_length}, cache_length {cache_length}, factor {factor}: "
            "use 0 < cache_length <= max_length and factor > 0"
        )
    if lengths.is_floating_point() or lengths.dim() != 1 or bool((lengths < 0).any()):
        raise InvalidInputError("lengths is not an integer tensor [responses] of values >= 0")
    excess = lengths.to(torch.float64) - (max_length - cache_length)
    penalty = (-excess / cache_length * factor).clamp(max=0.0)
    if floor:
        penalty = penalty.clamp(min=-factor)
    return penalty.to(torch.float32)
