"""`QuantSettings`: every choice that decides a bit of a quantised tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

import torch

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.quant.formats import BLOCK, BlockFormat, ScaleRule

_SOURCE_DTYPES: Final = {"bfloat16": torch.bfloat16, "float32": torch.float32}

# Choices of which this release knows exactly one, recorded so that a reader of a checkpoint can
# tell what they were.
_ONLY_CHOICE: Final[dict[str, str | int]] = {
    "block": BLOCK,
    "ties": "even",
    "zero_block": "lowest_scale_positive_zeros",
    "not_finite": "raise",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantSettings:
    """How a tensor becomes blocks. Two sides that differ in any field hold different weights.

    Args:
        scale_rule: how a block's scale follows from its largest magnitude; there is no default,
            because every library has another one.
        format: element format.
        source_dtype: what is quantised: the tensor rounded to this dtype. An engine that loads
            bfloat16 checkpoints quantises bfloat16, so a trainer with float32 master weights has to
            round them first: ``bfloat16``.
        block: elements per scale.
        ties: where a number halfway between two codes goes.
        zero_block: how a block without any nonzero code is written.
        not_finite: what happens to NaN and infinity.

    Raises:
        InvalidInputError: a field has a wrong type.
        UnsupportedError: a field names a choice that this release does not implement.
    """

    scale_rule: ScaleRule
    format: BlockFormat = BlockFormat.MXFP4
    source_dtype: str = "bfloat16"
    block: int = BLOCK
    ties: str = "even"
    zero_block: str = "lowest_scale_positive_zeros"
    not_finite: str = "raise"

    def __post_init__(self) -> None:
        if not isinstance(self.scale_rule, ScaleRule):
            known = ", ".join(f"ScaleRule.{rule.name}" for rule in ScaleRule)
            raise InvalidInputError(f"scale_rule is {self.scale_rule!r}: use one of {known}")
        if not isinstance(self.format, BlockFormat):
            raise InvalidInputError(f"format is {self.format!r}: use a BlockFormat")
        if self.source_dtype not in _SOURCE_DTYPES:
            raise UnsupportedError(
                f"source_dtype is {self.source_dtype!r}: use one of {', '.join(_SOURCE_DTYPES)}"
            )
        for name, choice in _ONLY_CHOICE.items():
            if getattr(self, name) != choice:
                raise UnsupportedError(
                    f"{name} is {getattr(self, name)!r}: this release implements {choice!r} only"
                )

    @property
    def source(self) -> torch.dtype:
        """``source_dtype`` as a torch dtype."""
        return _SOURCE_DTYPES[self.source_dtype]

    def to_mapping(self) -> dict[str, Any]:
        """The settings as plain data, for a checkpoint or a recipe."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**values, "scale_rule": self.scale_rule.value, "format": self.format.value}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> QuantSettings:
        """Reads `to_mapping`'s data.

        Raises:
            InvalidInputError: a key is missing or unknown, or names an unknown rule or format. A
                missing key is an error because its default could differ from the writer's.
        """
        known = {field.name for field in fields(cls)}
        missing, unknown = sorted(known - values.keys()), sorted(values.keys() - known)
        if missing or unknown:
            wrong = f"lack {', '.join(missing)}" if missing else f"have unknown {unknown[0]}"
            raise InvalidInputError(f"quantiser settings {wrong}: write exactly {sorted(known)}")
        named: dict[str, Any] = dict(values)
        for name, kind in (("scale_rule", ScaleRule), ("format", BlockFormat)):
            try:
                named[name] = kind(named[name])
            except ValueError as error:
                choices = ", ".join(member.value for member in kind)
                raise InvalidInputError(
                    f"{name} is {named[name]!r}: use one of {choices}"
                ) from error
        return cls(**named)
