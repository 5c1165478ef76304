"""What the autograd functions of the kernels share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.autograd import function

if TYPE_CHECKING:
    from collections.abc import Callable


def once_differentiable(backward: Callable[..., Any]) -> Any:
    """Marks a backward that has no derivative of its own: asking for a second one raises.

    It is torch's decorator of the same name with a type under which `backward` may name its
    gradients.
    """
    return function.once_differentiable(backward)
