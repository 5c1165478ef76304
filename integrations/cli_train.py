"""`lockstep train` around the trainer: observers, signals, and the report at every kind of end."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import typer
from rich.console import Console
from rich.syntax import Syntax

from integrations.cli_errors import InputError, Invocation
from integrations.cli_output import describe_run
from integrations.report import ReportError, RunRecord, load_run, save_report
from integrations.report.record import EVENTS_FILE
from integrations.trainer.observers import (
    Event,
    JsonlObserver,
    LiveObserver,
    LogObserver,
    Observer,
    ObserverGroup,
    TensorBoardObserver,
)
from integrations.trainer.recipe import Recipe
from integrations.trainer.run_lock import run_lock

__all__ = ["print_recipe", "run_training"]

# What a run leaves in its directory, besides the lock that anyone who tries to run takes.
TRACES_OF_A_RUN = (EVENTS_FILE, "journal", "checkpoints")


class _Terminated(KeyboardInterrupt):
    """SIGTERM: stop as after Ctrl-C, in good order."""


class _BeginObserver:
    """Notes in the invocation that the run has begun."""

    def __init__(self, invocation: Invocation) -> None:
        self._invocation = invocation

    def __call__(self, event: Event) -> None:
        self._invocation.run_began = True

    def close(self) -> None:
        """Nothing is held open."""


def print_recipe(recipe: Recipe) -> None:
    """The resolved recipe as YAML on stdout; coloured only for a terminal."""
    text = recipe.to_yaml()
    console = Console()
    if console.is_terminal:
        console.print(Syntax(text.rstrip("\n"), "yaml", background_color="default", word_wrap=True))
    else:
        typer.echo(text, nl=not text.endswith("\n"))


def run_training(
    recipe: Recipe,
    *,
    resume: bool,
    fresh: bool = False,
    quiet: bool,
    command: Sequence[str],
    invocation: Invocation,
) -> dict[str, Any]:
    """Trains, shows progress on stderr, writes the report, prints the summary.

    Args:
        recipe: the validated recipe.
        resume: go on with the run that the run directory holds.
        fresh: move a run that the run directory holds aside first.
        quiet: print nothing but errors.
        command: the words of this call without ``--resume``, to tell how to go on.
        invocation: learns when the run has begun.

    Returns:
        the summary, with the keys of ``train --json``.

    Raises:
        InputError: the run directory holds a run, and `resume` says otherwise.
        typer.Exit: Ctrl-C (130) or SIGTERM (143) ended the run.
        IntegrationError, ConsistencyError, WeightPlaneError, OSError: the run failed.
    """
    from integrations.trainer.run import train

    run_dir = Path(recipe.run_dir)
    if fresh:
        _set_aside(run_dir)
    _check_run_dir(run_dir, resume=resume)
    observers = ObserverGroup(
        _BeginObserver(invocation),
        JsonlObserver(run_dir / EVENTS_FILE),
        TensorBoardObserver(run_dir / "tensorboard"),
        *([] if quiet else [_progress()]),
    )
    try:
        with _sigterm_interrupts(), observers:
            summary = train(recipe, resume=resume, observer=observers)
    except KeyboardInterrupt as stopped:
        _draw(run_dir, began=invocation.run_began)
        again = shlex.join([*command, "--resume"] if invocation.run_began else command)
        typer.echo(f"lockstep: stopped; go on with: {again}", err=True)
        raise typer.Exit(143 if isinstance(stopped, _Terminated) else 130) from stopped
    except BaseException:
        _draw(run_dir, began=invocation.run_began)
        raise
    run, page = _draw(run_dir, began=True)
    if not quiet:
        console = Console()
        if run is not None:
            describe_run(run, console)
        if page is not None:
            console.print(f"report: {page}", soft_wrap=True, markup=False, highlight=False)
    return summary


def _holds_run(run_dir: Path) -> bool:
    return any(_has_content(run_dir / name) for name in TRACES_OF_A_RUN)


def _set_aside(run_dir: Path) -> None:
    """Rename the folder of an earlier run to the first free ``NAME-old-N`` beside it."""
    if not _holds_run(run_dir):
        return
    # The lock, because a run that is still going on must not lose its folder.
    with run_lock(run_dir):
        number = 1
        while (aside := run_dir.with_name(f"{run_dir.name}-old-{number}")).exists():
            number += 1
        run_dir.rename(aside)
    typer.echo(f"lockstep: the earlier run is now {aside}", err=True)


def _check_run_dir(run_dir: Path, *, resume: bool) -> None:
    holds_run = _holds_run(run_dir)
    if holds_run and not resume:
        raise InputError(
            f"{run_dir} already holds a run: go on with it by --resume, set it aside by --fresh, "
            "or choose another place by --run-dir DIR"
        )
    if resume and not holds_run:
        raise InputError(f"{run_dir} holds no run to go on with: leave out --resume to start one")


def _has_content(path: Path) -> bool:
    if path.is_dir():
        return any(path.iterdir())
    return path.is_file() and path.stat().st_size > 0


def _progress() -> Observer:
    """A live view for a terminal, plain lines for everything else; both on stderr."""
    console = Console(stderr=True)
    if console.is_terminal:
        return LiveObserver(console)
    return LogObserver(lambda text: typer.echo(text, err=True))


def _draw(run_dir: Path, *, began: bool) -> tuple[RunRecord | None, Path | None]:
    """Writes the report if there is anything to report; a failure to draw never hides the run's."""
    if not began:
        return None, None
    run = None
    try:
        run = load_run(run_dir)
        return run, save_report(run)
    except ReportError:
        return None, None
    except Exception as error:  # whatever a plot does, the result of the training stands
        reason = " ".join(str(error).split()) or type(error).__name__
        see = f"lockstep report {run_dir} --debug"
        typer.echo(f"lockstep: no report could be drawn ({reason}); see: {see}", err=True)
        return run, None


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Within the block SIGTERM, which cluster managers send, stops the run like Ctrl-C."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
