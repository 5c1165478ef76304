"""Events of one kind as columns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

__all__ = ["Floats", "Table", "is_number"]

Floats = NDArray[np.float64]


class Table:
    """Rows in order; a column is an array of fp64 in which a missing or odd value is NaN."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self.rows: tuple[Mapping[str, Any], ...] = tuple(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, name: str) -> Floats:
        """The finite numbers under `name`; everything else and absent keys become NaN."""
        values = (row.get(name) for row in self.rows)
        return np.array([v if is_number(v) else np.nan for v in values], dtype=np.float64)

    def texts(self, name: str) -> list[str]:
        """The values under `name` as texts; absent ones are empty."""
        return ["" if row.get(name) is None else str(row[name]) for row in self.rows]

    def matching(self, name: str, text: str) -> Table:
        """The rows whose value under `name` reads `text`."""
        return self.where(np.array([value == text for value in self.texts(name)], dtype=np.bool_))

    def where(self, keep: NDArray[np.bool_]) -> Table:
        """The rows at which `keep` is true."""
        return Table(row for row, wanted in zip(self.rows, keep, strict=True) if wanted)

    def sorted_by(self, name: str) -> Table:
        """The rows in the order of a column; rows without a number there come last."""
        return Table(self.rows[index] for index in np.argsort(self.column(name), kind="stable"))

    def last_per(self, name: str) -> Table:
        """One row per value of a column, the last one, in the order of the column."""
        latest = {row[name]: row for row in self.rows if is_number(row.get(name))}
        return Table(latest.values()).sorted_by(name)


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value of an event is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value)
