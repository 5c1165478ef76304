"""A live view of a run in a terminal: a bar for the warm start, a bar for training, facts below."""

from __future__ import annotations

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from integrations.trainer.observers.observer import Event
from integrations.trainer.observers.progress import RunProgress

__all__ = ["LiveObserver"]


class LiveObserver:
    """Draws the state of the run in place. Use `LogObserver` where the output is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._state = RunProgress()
        self._bars = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(compact=True),
            console=console,
        )
        self._warm = self._bars.add_task("warm start", total=None, visible=False, note="")
        self._train = self._bars.add_task("training", total=None, start=False, note="")
        self._live: Live | None = None

    def __call__(self, event: Event) -> None:
        state = self._state
        state.update(event)
        if self._live is None:
            self._live = Live(
                self._view(), console=self._console, refresh_per_second=8, transient=True
            )  # fmt: skip
            self._live.start()
        if state.warm_steps:
            loss = "" if state.warm_loss is None else f"loss {state.warm_loss:.3f}"
            self._bars.update(
                self._warm, completed=state.warm_step, total=state.warm_steps, visible=True,
                note=loss,
            )  # fmt: skip
        if state.version and not self._bars.tasks[1].started:
            self._bars.start_task(self._train)
        self._bars.update(
            self._train, completed=state.version, total=state.versions or None,
            note="" if state.version else state.phase,
        )  # fmt: skip
        self._live.update(self._view())

    def close(self) -> None:
        """Takes the view off the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _view(self) -> Group:
        facts = self._state.facts() or "waiting for the first events"
        return Group(self._bars, Text(facts, style="dim"))
