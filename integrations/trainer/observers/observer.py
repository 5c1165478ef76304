"""What every observer is: a function of one event that can be closed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

__all__ = ["Event", "Observer"]

Event = Mapping[str, Any]


class Observer(Protocol):
    """Takes the events of a run one after the other, from one thread."""

    def __call__(self, event: Event) -> None:
        """Takes one event and keeps no reference to it."""
        ...

    def close(self) -> None:
        """Finishes what was begun; calling it again does nothing."""
        ...
