"""Several observers behind one."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

from integrations.trainer.observers.observer import Event, Observer

__all__ = ["ObserverGroup"]


class ObserverGroup:
    """Passes every event to each observer in turn; leaving its ``with`` block closes all of them.

    An exception of an observer ends the run: events that cannot be recorded (a full disk) would
    otherwise be missing from every report without a word. The others are closed all the same.
    """

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def __call__(self, event: Event) -> None:
        for observer in self._observers:
            observer(event)

    def close(self) -> None:
        """Closes every observer, also when one of them fails."""
        with ExitStack() as stack:
            for observer in reversed(self._observers):
                stack.callback(observer.close)

    def __enter__(self) -> ObserverGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
