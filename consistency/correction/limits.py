"""Checks of a correction's limits: one clear line before any token is looked at."""

from __future__ import annotations

import math

from consistency.errors import InvalidInputError


def require_cap(name: str, value: float) -> float:
    """A finite number > 0, or inf for no cap."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise InvalidInputError(f"{name} is {value!r}: use a number above 0 (inf for no cap)")
    return float(value)


def require_interval(low: float, high: float) -> tuple[float, float]:
    """Limits of a ratio: 0 <= low <= high, both ends inclusive, high may be inf."""
    for name, value in (("low", low), ("high", high)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
            raise InvalidInputError(f"{name} is {value!r}: use a number")
    if low < 0 or high < low or high == 0:
        raise InvalidInputError(
            f"low is {low!r} and high is {high!r}: use 0 <= low <= high, high > 0"
        )
    return float(low), float(high)


def log_or_infinity(value: float) -> float:
    """log(value), with -inf for 0: intervals are compared in log space, where exp cannot round a
    ratio that lies exactly on a limit to the wrong side of it."""
    return math.log(value) if value > 0 else -math.inf
