"""Events of one kind as columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Floats", "Table"]

Floats = NDArray[np.float64]


class Table:
    """Rows in order; a column is an array of fp64 in which a missing or odd value is NaN."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self.rows: tuple[Mapping[str, Any], ...] = tuple(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, name: str) -> Floats:
        """The numbers under `name`; booleans, texts, nulls and absent keys become NaN."""
        values = [_number(row.get(name)) for row in self.rows]
        return np.array(values, dtype=np.float64)

    def where(self, keep: NDArray[np.bool_]) -> Table:
        """The rows at which `keep` is true."""
        return Table(row for row, wanted in zip(self.rows, keep, strict=True) if wanted)

    def sorted_by(self, name: str) -> Table:
        """The rows in the order of a column; rows without a number there come last."""
        return Table(self.rows[index] for index in np.argsort(self.column(name), kind="stable"))

    def last_per(self, name: str) -> Table:
        """One row per value of a column, the last one, in the order of the column."""
        latest = {row[name]: row for row in self.rows if np.isfinite(_number(row.get(name)))}
        return Table(latest.values()).sorted_by(name)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return np.nan
    return float(value)
