"""The ``correction`` section of a recipe: what the learner does about off-policy tokens.

One model per kind, named and with the limits as in `consistency.correction`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from integrations.trainer.recipe_sections import NotNegative, Positive, Section, problem

__all__ = [
    "CorrectionRecipe",
    "CorrectionSection",
    "DivergenceMaskCorrection",
    "IcePopCorrection",
    "NoCorrection",
    "RatioMaskCorrection",
    "SequenceTisCorrection",
    "TokenTisCorrection",
]


class CorrectionSection(Section):
    """Base of every kind."""

    @property
    def limits(self) -> dict[str, Any]:
        """Keyword arguments for ``consistency.correction.make_correction(kind, **limits)``."""
        return self.model_dump(exclude={"kind"})


def _require_interval(low: float, high: float) -> None:
    if low > high:
        raise problem("correction.low", f"is {low}, above correction.high ({high}); swap them")


class NoCorrection(CorrectionSection):
    """Weight 1 on every token."""

    kind: Literal["none"] = "none"


class TokenTisCorrection(CorrectionSection):
    """Truncated importance sampling, one weight per token."""

    kind: Literal["token_tis"] = "token_tis"
    limit: Positive = 2.0
    normalise: bool = False


class SequenceTisCorrection(CorrectionSection):
    """Truncated importance sampling, one weight per response."""

    kind: Literal["sequence_tis"] = "sequence_tis"
    limit: Positive = 2.0
    normalise: bool = False


class RatioMaskCorrection(CorrectionSection):
    """Masked importance sampling: tokens or responses outside the limits are dropped."""

    kind: Literal["ratio_mask"] = "ratio_mask"
    level: Literal["token", "sequence", "geometric"] = "token"
    low: NotNegative = 0.5
    high: Positive = 2.0
    veto: Positive | None = None
    weighted: bool = True

    @model_validator(mode="after")
    def _is_an_interval(self) -> RatioMaskCorrection:
        _require_interval(self.low, self.high)
        return self


class DivergenceMaskCorrection(CorrectionSection):
    """Tokens or responses whose estimated divergence is above the limit are dropped."""

    kind: Literal["divergence_mask"] = "divergence_mask"
    estimator: Literal["k2", "k3"] = "k3"
    level: Literal["token", "sequence_sum", "sequence_mean", "sequence_max"] = "token"
    limit: Positive


class IcePopCorrection(CorrectionSection):
    """A mask and an importance weight in one."""

    kind: Literal["icepop"] = "icepop"
    low: NotNegative = 0.5
    high: Positive = 5.0

    @model_validator(mode="after")
    def _is_an_interval(self) -> IcePopCorrection:
        _require_interval(self.low, self.high)
        return self


def _complete(value: Any) -> Any:
    """``correction: icepop`` is short for ``{kind: icepop}``, and limits alone are of token_tis."""
    if isinstance(value, str):
        return {"kind": value}
    if isinstance(value, dict) and "kind" not in value:
        return {"kind": "token_tis", **value}
    return value


CorrectionRecipe = Annotated[
    NoCorrection
    | TokenTisCorrection
    | SequenceTisCorrection
    | RatioMaskCorrection
    | DivergenceMaskCorrection
    | IcePopCorrection,
    Field(discriminator="kind"),
    BeforeValidator(_complete),
]
