"""`Correction`: what a correction decided for each token of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from consistency.errors import InvalidInputError
from consistency.token_layout import TokenLayout


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    """Importance weights, and the tokens that stay in the loss.

    Args:
        weight: fp32 or fp64, shape of the batch, detached; multiplies a token's loss outside any
            clip. 0 where ``mask`` is False.
        mask: bool, same shape: tokens that stay, a subset of the loss mask.
        loss_tokens: number of tokens in the loss mask, before anything was dropped.
        truncated_tokens: how many of them had their weight cut to a limit.

    Raises:
        InvalidInputError: the four do not fit together.
    """

    weight: Tensor
    mask: Tensor
    loss_tokens: int
    truncated_tokens: int = 0

    def __post_init__(self) -> None:
        if self.weight.shape != self.mask.shape or self.mask.dtype != torch.bool:
            raise InvalidInputError(
                f"correction weight {list(self.weight.shape)} and mask {list(self.mask.shape)} "
                f"({self.mask.dtype}) do not fit: use equal shapes and a bool mask"
            )
        if self.weight.requires_grad:
            raise InvalidInputError("correction weight carries a gradient: detach it")
        if bool((~self.mask & (self.weight != 0)).any()):
            raise InvalidInputError("correction weight is not 0 on a token that the mask drops")
        if (
            not 0 <= self.truncated_tokens <= self.loss_tokens
            or self.kept_tokens > self.loss_tokens
        ):
            raise InvalidInputError(
                f"correction keeps {self.kept_tokens} and truncates {self.truncated_tokens} of "
                f"{self.loss_tokens} tokens: loss_tokens counts the whole loss mask"
            )

    @classmethod
    def of(
        cls,
        weight: Tensor,
        kept: Tensor,
        layout: TokenLayout,
        truncated: Tensor | None = None,
    ) -> Correction:
        """Joins a weight and a keep decision per token with the loss mask.

        Args:
            weight: floating, the layout's shape.
            kept: bool, same shape; entries outside the loss mask are ignored.
            layout: of the batch, with its loss mask.
            truncated: bool, same shape: tokens whose weight was cut to a limit.
        """
        mask = layout.mask & kept
        return cls(
            weight=torch.where(mask, weight, torch.zeros_like(weight)).detach(),
            mask=mask,
            loss_tokens=int(layout.mask.sum()),
            truncated_tokens=0 if truncated is None else int((layout.mask & truncated).sum()),
        )

    @property
    def kept_tokens(self) -> int:
        """Tokens that stay in the loss."""
        return int(self.mask.sum())

    @property
    def masked_fraction(self) -> float:
        """Share of the loss mask's tokens that were dropped; 0 for an empty loss mask."""
        return (self.loss_tokens - self.kept_tokens) / max(self.loss_tokens, 1)

    @property
    def truncated_fraction(self) -> float:
        """Share of the loss mask's tokens whose weight was cut to a limit."""
        return self.truncated_tokens / max(self.loss_tokens, 1)

    def combine(self, other: Correction) -> Correction:
        """Both at once: weights multiply, masks are AND-ed. The two must come from one batch.

        Raises:
            InvalidInputError: the shapes or the loss masks' sizes differ.
        """
        if self.mask.shape != other.mask.shape or self.loss_tokens != other.loss_tokens:
            raise InvalidInputError(
                f"corrections of {list(self.mask.shape)} with {self.loss_tokens} loss tokens and "
                f"{list(other.mask.shape)} with {other.loss_tokens}: combine those of one batch"
            )
        return Correction(
            weight=self.weight * other.weight,
            mask=self.mask & other.mask,
            loss_tokens=self.loss_tokens,
            truncated_tokens=max(self.truncated_tokens, other.truncated_tokens),
        )

    def statistics(self) -> dict[str, float]:
        """Weight statistics over the kept tokens alone, never over padding; 0 when none is kept."""
        kept = self.weight[self.mask].to(torch.float64)
        empty = kept.numel() == 0
        return {
            "weight_token_mean": 0.0 if empty else float(kept.mean()),
            "weight_token_min": 0.0 if empty else float(kept.min()),
            "weight_token_max": 0.0 if empty else float(kept.max()),
            "weight_token_std": float(kept.std()) if kept.numel() > 1 else 0.0,
            "masked_fraction": self.masked_fraction,
            "truncated_fraction": self.truncated_fraction,
        }
