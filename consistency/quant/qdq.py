"""Fake quantisation for training: QDQ in the forward, a straight-through gradient in the backward.

The forward computes with exactly the values that a rollout engine unpacks: the float32 (or
bfloat16) weight is rounded to the source dtype, then quantised and dequantised. The backward hands
the gradient of the QDQ weight to the weight itself (Bengio et al., arXiv 1308.3432).
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.kernels._arguments import main_gradient
from consistency.kernels._autograd import once_differentiable
from consistency.quant.mxfp4 import PackedTensor, pack, qdq
from consistency.quant.settings import QuantSettings

Gradient = Literal["identity", "clipped"]
"""identity: every element receives its gradient. clipped: those beyond the block's largest code,
which the forward saturates, receive none."""


def fake_quantise(
    x: torch.Tensor,
    settings: QuantSettings,
    *,
    gradient: Gradient = "identity",
    out_dtype: torch.dtype | None = None,
    name: str = "x",
) -> torch.Tensor:
    """`qdq` with a straight-through gradient.

    Args:
        x, settings, name: as in `pack`.
        gradient: what saturated elements receive.
        out_dtype: bfloat16 or float32; by default that of `x`.

    Raises:
        InvalidInputError, UnsupportedError: as `qdq`; an unknown gradient.
    """
    _require_gradient(gradient)
    values = qdq(x, settings, out_dtype=out_dtype, name=name)
    mask = None
    if gradient == "clipped":
        mask = _inside(x, settings)
    return _StraightThrough.apply(x, values, mask)


class FakeQuant(torch.nn.Module):
    """A parametrization that shows a module the QDQ of its weight.

    ``torch.nn.utils.parametrize.register_parametrization(module, "weight", FakeQuant(...),
    unsafe=True)`` does it for one weight; `quantise_modules` does it for a model. The QDQ is
    computed once per optimizer step: it is kept until the weight changes in place.

    A weight with an attribute `main_grad` (float32, its shape) keeps it: the kernels add the
    gradient of the QDQ weight there, and autograd receives None, as without quantisation.

    Args:
        settings: the quantiser's.
        gradient: what saturated elements receive; "clipped" excludes `main_grad`.
        out_dtype: dtype in which the module computes, bfloat16 or float32.
        name: what to call the weight in errors.
    """

    def __init__(
        self,
        settings: QuantSettings,
        *,
        gradient: Gradient = "identity",
        out_dtype: torch.dtype = torch.bfloat16,
        name: str = "weight",
    ) -> None:
        super().__init__()
        _require_gradient(gradient)
        self.settings = settings
        self.gradient: Gradient = gradient
        self.out_dtype = out_dtype
        self.name = name
        self._values: torch.Tensor | None = None
        self._mask: torch.Tensor | None = None
        self._of: tuple[int, int, torch.device] | None = None

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """The QDQ of `weight`, [..., K] in `out_dtype`."""
        values = self._cached(weight)
        buffer = main_gradient(weight)
        if buffer is None or not weight.requires_grad:
            return _StraightThrough.apply(weight, values, self._mask)
        if self._mask is not None:
            raise UnsupportedError(
                f"{self.name} has a main_grad, into which kernels add without a mask: use "
                'gradient="identity", or remove main_grad'
            )
        # A leaf of its own, so that the kernels find main_grad on the tensor that they are given.
        leaf = values.detach().requires_grad_()
        leaf.main_grad = buffer  # type: ignore[attr-defined]
        return leaf

    def packed(self, weight: torch.Tensor) -> PackedTensor:
        """The codes that stand for the values of `forward`."""
        return pack(weight, self.settings, name=self.name)

    def forget(self) -> None:
        """Drops the kept QDQ: for changes that autograd does not see (``weight.data.copy_``)."""
        self._values, self._mask, self._of = None, None, None

    def _cached(self, weight: torch.Tensor) -> torch.Tensor:
        state = (weight.data_ptr(), weight._version, weight.device)
        if self._values is None or self._of != state:
            self._values = qdq(weight, self.settings, out_dtype=self.out_dtype, name=self.name)
            self._mask = _inside(weight, self.settings) if self.gradient == "clipped" else None
            self._of = state
        return self._values


def _inside(x: torch.Tensor, settings: QuantSettings) -> torch.Tensor:
    """bool [..., K]: which elements the largest code of their block does not saturate."""
    packed = pack(x, settings)
    largest = 6.0 if settings.format.code == 4 else 448.0
    tops = torch.full(packed.scales.shape, largest, dtype=torch.float64, device=x.device)
    bounds = torch.ldexp(tops, packed.scales.int() - 127)
    blocks = x.detach().to(settings.source).double().unflatten(-1, (-1, settings.block))
    return (blocks.abs() <= bounds.unsqueeze(-1)).flatten(-2)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.mask, ctx.dtype = mask, x.dtype
        return values.view_as(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.mask is not None:
            grad = torch.where(ctx.mask, grad, torch.zeros_like(grad))
        return grad.to(ctx.dtype), None, None


def _require_gradient(gradient: str) -> None:
    if gradient not in get_args(Gradient):
        known = " or ".join(map(repr, get_args(Gradient)))
        raise InvalidInputError(f"gradient is {gradient!r}: use {known}")
