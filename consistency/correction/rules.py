"""`make_correction`: a correction and its limits, chosen by name from a recipe."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from consistency.correction.icepop import icepop
from consistency.correction.masked import divergence_mask, ratio_mask
from consistency.correction.record import Correction
from consistency.correction.truncated import sequence_tis, token_tis
from consistency.errors import InvalidInputError
from consistency.token_layout import TokenLayout


def no_correction(
    lp_old: Tensor,
    lp_roll: Tensor,
    mask: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
) -> Correction:
    """Weight 1 on every token of the loss mask; the log-probabilities are still checked."""
    layout = TokenLayout.of(lp_old, mask, cu_seqlens)
    log_ratio = layout.log_ratio(("lp_old", lp_old.detach()), ("lp_roll", lp_roll.detach()))
    return Correction.of(torch.ones_like(log_ratio), layout.mask, layout)


_RULES: Final = MappingProxyType[str, Callable[..., Correction]](
    {
        "none": no_correction,
        "token_tis": token_tis,
        "sequence_tis": sequence_tis,
        "ratio_mask": ratio_mask,
        "divergence_mask": divergence_mask,
        "icepop": icepop,
    }
)

CORRECTIONS: Final = tuple(_RULES)
"""Names that `make_correction` knows."""


@dataclass(frozen=True, slots=True)
class CorrectionRule:
    """A named correction with its limits; call it with the log-probabilities of a batch.

    Args:
        name: one of `CORRECTIONS`.
        limits: keyword arguments of the function of that name, as sorted pairs.
    """

    name: str
    limits: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if self.name not in _RULES:
            raise InvalidInputError(
                f"correction is {self.name!r}: use one of {', '.join(CORRECTIONS)}"
            )
        parameters = inspect.signature(_RULES[self.name]).parameters.values()
        allowed = {
            parameter.name: parameter.default is inspect.Parameter.empty
            for parameter in parameters
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY and parameter.name != "cu_seqlens"
        }
        given = dict(self.limits)
        for limit in given:
            if limit not in allowed:
                raise InvalidInputError(
                    f"correction {self.name!r} has no limit {limit!r}: "
                    f"it takes {', '.join(allowed) or 'none'}"
                )
        for limit, required in allowed.items():
            if required and limit not in given:
                raise InvalidInputError(f"correction {self.name!r} needs the limit {limit!r}")
        # One token through the function checks the values where they are defined, so that a recipe
        # with a bad limit fails when it is read and not at the first batch.
        one = torch.zeros(1)
        self(one, one, torch.ones(1))

    def __call__(
        self,
        lp_old: Tensor,
        lp_roll: Tensor,
        mask: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
    ) -> Correction:
        """Correction of one batch; arguments as in `token_tis`."""
        return _RULES[self.name](lp_old, lp_roll, mask, cu_seqlens=cu_seqlens, **dict(self.limits))


def make_correction(name: str, **limits: Any) -> CorrectionRule:
    """The correction of that name, with its limits checked.

    Args:
        name: ``none``, ``token_tis``, ``sequence_tis``, ``ratio_mask``, ``divergence_mask`` or
            ``icepop``.
        limits: keyword arguments of the function of that name; what is left out takes its default.

    Raises:
        InvalidInputError: an unknown name (the message lists the names), an unknown, missing or
            bad limit.
    """
    return CorrectionRule(name, tuple(sorted(limits.items())))
