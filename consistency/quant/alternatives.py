"""What other quantisers make of a weight: each way to differ that is known from the field.

Used to name the cause when a checkpoint does not hold the trainer's values, and to measure what
each difference costs. Nothing here is a path of the codec: plain torch in float64, where every step
is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product, starmap
from typing import Literal

import torch

from consistency.quant.formats import BLOCK, BlockFormat, ScaleRule
from consistency.quant.mxfp4 import qdq
from consistency.quant.settings import QuantSettings

Ties = Literal["even", "away", "zero", "stochastic"]
"""Where a number between two codes goes: to the nearer one, and halfway to the even code, away from
zero, or towards it; or to either with a probability by its distance."""

ScaleChoice = ScaleRule | Literal["log2"]
"""A rule of the codec, or ``ceil(log2(amax / 6))`` in floating point, which is wrong for some
mantissas."""

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LOWEST, _HIGHEST = BlockFormat.MXFP4.scale_range


@dataclass(frozen=True, slots=True)
class Alternative:
    """A quantiser, by what it does.

    Args:
        scale: how a block's scale is chosen.
        ties: how elements are rounded.
        source_dtype: what a float32 weight is rounded to before anything else.
        axis: -1, the contraction axis, or -2, the other one.
        through_fp8: the weight was stored in MXFP8 (E4M3) before.
    """

    scale: ScaleChoice
    ties: Ties = "even"
    source_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    axis: Literal[-1, -2] = -1
    through_fp8: bool = False

    def difference(self, settings: QuantSettings) -> str:
        """In words, what it does otherwise than `settings`; empty if nothing."""
        parts = []
        if self.scale == "log2":
            parts.append("scale as ceil(log2(amax / 6)) in floating point")
        elif self.scale is not settings.scale_rule:
            parts.append(f"scale rule {self.scale.value}")
        if self.ties == "stochastic":
            parts.append("stochastic rounding")
        elif self.ties != "even":
            parts.append({"away": "ties away from zero", "zero": "ties towards zero"}[self.ties])
        if self.source_dtype != settings.source_dtype:
            parts.append(f"quantised from {self.source_dtype}")
        if self.axis != -1:
            parts.append("blocks along the wrong axis")
        if self.through_fp8:
            parts.append("quantised twice, to FP8 first")
        return ", ".join(parts)

    def qdq(self, x: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """The values it makes of a matrix.

        Args:
            x: float32 or bfloat16 [out, in], finite; `axis` a multiple of 32.
            generator: for stochastic rounding.

        Returns:
            float32, the shape of `x`.
        """
        if self.source_dtype == "bfloat16":
            x = x.bfloat16()
        if self.through_fp8:
            fp8 = QuantSettings(
                scale_rule=self.scale if isinstance(self.scale, ScaleRule) else ScaleRule.RCEIL,
                format=BlockFormat.MXFP8,
                source_dtype=self.source_dtype,
            )
            x = qdq(x, fp8)
        if self.axis == -2:
            x = x.transpose(-1, -2)
        blocks = x.double().unflatten(-1, (-1, BLOCK))
        exponents = self._exponents(x).unsqueeze(-1)
        magnitudes = torch.ldexp(blocks.abs(), -exponents).clamp_max(6.0)
        rounded = _round(magnitudes, self.ties, generator)
        values = torch.copysign(torch.ldexp(rounded, exponents), blocks).flatten(-2).float()
        return values.transpose(-1, -2).contiguous() if self.axis == -2 else values

    def _exponents(self, x: torch.Tensor) -> torch.Tensor:
        """int64 [..., blocks]: the exponent of each block's scale."""
        largest = x.unflatten(-1, (-1, BLOCK)).abs().amax(-1)
        if self.scale == "log2":
            exponents = torch.ceil(torch.log2(largest / 6))
            bytes_ = torch.nan_to_num(exponents.double(), neginf=_LOWEST - 127).long() + 127
        else:
            bits = largest.float().view(torch.int32).long()
            bytes_ = ((bits + self.scale.carry(BlockFormat.MXFP4)) >> 23) - 2
        return bytes_.clamp(_LOWEST, _HIGHEST) - 127


def alternatives(settings: QuantSettings, *, square: bool) -> Iterator[Alternative]:
    """Every deterministic alternative to `settings`, those with fewest differences first.

    Args:
        settings: the quantiser's that is taken for right.
        square: whether the other axis has whole blocks, so that it can be the wrong one.
    """
    scales: tuple[ScaleChoice, ...] = (*ScaleRule, "log2")
    ties: tuple[Ties, ...] = ("even", "away", "zero")
    sources: tuple[Literal["bfloat16", "float32"], ...] = ("bfloat16", "float32")
    axes: tuple[Literal[-1, -2], ...] = (-1, -2) if square else (-1,)
    found = [
        alternative
        for alternative in starmap(Alternative, product(scales, ties, sources, axes, (False, True)))
        if alternative.difference(settings)
    ]
    yield from sorted(found, key=lambda one: one.difference(settings).count(", "))


def neighbours(x: torch.Tensor, settings: QuantSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """float32, the shape of `x`: the codes' values next to each element, towards zero and away.

    An element beyond the largest code has that code on both sides.
    """
    alternative = Alternative(settings.scale_rule)
    source = x.to(settings.source)
    blocks = source.double().unflatten(-1, (-1, BLOCK))
    exponents = alternative._exponents(source).unsqueeze(-1)
    lower, upper, _ = _between(torch.ldexp(blocks.abs(), -exponents).clamp_max(6.0))
    signed = (
        torch.copysign(torch.ldexp(side, exponents), blocks).flatten(-2).float()
        for side in (lower, upper)
    )
    return next(signed), next(signed)


def _between(magnitudes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The values below and above each magnitude, and the code of the lower one."""
    values = torch.tensor(_VALUES, dtype=torch.float64)
    low = torch.bucketize(magnitudes.contiguous(), values, right=True) - 1
    exact = values[low] == magnitudes
    high = torch.where(exact, low, (low + 1).clamp_max(len(_VALUES) - 1))
    return values[low], values[high], low


def _round(magnitudes: torch.Tensor, ties: Ties, generator: torch.Generator | None) -> torch.Tensor:
    lower, upper, low = _between(magnitudes)
    gap = torch.where(upper > lower, upper - lower, 1.0)
    fraction = (magnitudes - lower) / gap
    if ties == "stochastic":
        chance = torch.rand(fraction.shape, dtype=torch.float64, generator=generator)
        return torch.where(chance < fraction, upper, lower)
    up_at_half = {"even": low % 2 == 1, "away": low >= 0, "zero": low < 0}[ties]
    up = (fraction > 0.5) | ((fraction == 0.5) & up_at_half)
    return torch.where(up, upper, lower)
