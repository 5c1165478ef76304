"""A run as plain lines, for log files and terminals that cannot redraw."""

from __future__ import annotations

import time
from collections.abc import Callable

from integrations.trainer.observers.observer import Event
from integrations.trainer.observers.progress import RunProgress

__all__ = ["LogObserver"]


class LogObserver:
    """Writes one line per milestone, and one per `interval` seconds about the steps between.

    Args:
        write: takes one line without its end.
        interval: least time between two lines about steps or the warm start.
        clock: seconds that only go forward.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        *,
        interval: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write = write
        self._interval = interval
        self._clock = clock
        self._last = float("-inf")
        self._state = RunProgress()

    def __call__(self, event: Event) -> None:
        self._state.update(event)
        text, urgent = self._text(event)
        now = self._clock()
        if text is None or not (urgent or now - self._last >= self._interval):
            return
        if not urgent:
            self._last = now
        seconds = event.get("t")
        stamp = f"{seconds:8.1f} s  " if isinstance(seconds, int | float) else ""
        self._write(stamp + text)

    def close(self) -> None:
        """Nothing is held open."""

    def _text(self, event: Event) -> tuple[str | None, bool]:
        """The line for an event, if it deserves one, and whether it must not be left out."""
        state = self._state
        match event.get("event"):
            case "run_started":
                how = "resumed" if event.get("resumed") else "started"
                return f"run {state.name} {how}", True
            case "model":
                parameters, size = event.get("parameters"), event.get("model_bytes")
                if isinstance(parameters, int) and isinstance(size, int):
                    return f"model of {parameters:,} parameters, {size / 1e6:.1f} MB", True
                return None, False
            case "warm_start":
                loss = "" if state.warm_loss is None else f", loss {state.warm_loss:.3f}"
                last = state.warm_step == state.warm_steps
                return f"warm start {state.warm_step}/{state.warm_steps}{loss}", last
            case "evaluation":
                reward = state.held_out_last
                shown = "not a number" if reward is None else f"{reward:.4f}"
                return f"held-out reward {shown} at version {event.get('version')}", True
            case "step":
                last = state.version == state.versions
                return f"version {state.version}/{state.versions}  {state.facts()}", last
            case "replay_diverged":
                return f"step {event.get('step')} gave other weights than before the resume", True
            case "run_failed":
                return "run failed", True
            case "run_finished":
                return "run finished", True
        return None, False
