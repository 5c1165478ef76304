"""`train`: one training run, from the recipe to the summary."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from integrations.errors import RunError
from integrations.trainer.checkpoint import checkpoint_versions
from integrations.trainer.controller import Controller
from integrations.trainer.journal import Journal
from integrations.trainer.model import ModelConfig
from integrations.trainer.model_source import resolve_model
from integrations.trainer.recipe import Recipe, load_recipe
from integrations.trainer.run_lock import run_lock
from integrations.trainer.tasks import TaskStream
from integrations.trainer.tokenizer import load_tokenizer
from integrations.trainer.worker_learner import CHECKPOINTS
from integrations.trainer.worker_model import contract_of

__all__ = ["train"]

Event = dict[str, Any]
Observer = Callable[[Event], None]

RECIPE_FILE = "recipe.yaml"
EVENTS_FILE = "metrics.jsonl"
_TAIL_BYTES = 1 << 16


class RunClock:
    """Seconds since the run began; goes on where an earlier process of the run stopped."""

    def __init__(self, already_run: float = 0.0) -> None:
        self._origin = time.monotonic() - already_run

    def at(self, monotonic: float) -> float:
        """Run time of a `time.monotonic()` instant of any process of this machine."""
        return monotonic - self._origin


def train(recipe: Recipe, *, resume: bool, observer: Observer) -> dict[str, Any]:
    """Run (or go on with) the training that a recipe describes.

    Args:
        recipe: the validated recipe.
        resume: continue the run that lies in `recipe.run_dir`.
        observer: called with every event; the first one marks that the run has begun.

    Returns:
        The summary, with the keys of `lockstep train --json`.

    Raises:
        RunError: the run cannot be resumed with this recipe, a worker failed or was lost.
        IntegrationError, ConsistencyError, WeightPlaneError: as their messages say.
    """
    run_dir = Path(recipe.run_dir)
    contract = contract_of(recipe)
    source = resolve_model(recipe)
    ModelConfig.from_dict(source.config)
    tokenizer = load_tokenizer(recipe.tokenizer, source.folder)
    tasks = TaskStream(recipe.task)
    with run_lock(run_dir):
        _settle_recipe(recipe, run_dir, resume=resume)
        clock = RunClock(_last_run_time(run_dir / EVENTS_FILE) if resume else 0.0)
        journal = Journal(run_dir / "journal")
        try:
            newest = checkpoint_versions(run_dir / CHECKPOINTS)[-1:]
            recovered = journal.recover(
                newest[0] if newest else None, recipe.learner.samples_per_group
            )

            def emit(event: str, **fields: Any) -> Event:
                line = {
                    "event": event,
                    "t": clock.at(time.monotonic()),
                    "wall": time.time(),
                    **fields,
                }
                observer(line)
                return line

            emit(
                "run_started",
                recipe=recipe.to_mapping(),
                versions=_versions(),
                resumed=resume,
                contract=contract.digest(),
            )
            controller = Controller(
                recipe=recipe,
                run_dir=run_dir,
                tasks=tasks,
                tokenizer=tokenizer,
                journal=journal,
                recovered=recovered,
                contract_digest=contract.digest(),
                emit=emit,
                to_run_time=clock.at,
            )
            try:
                summary = controller.run().as_dict()
            except Exception as error:
                emit("run_failed", reason=" ".join(str(error).split()))
                raise
            emit("run_finished", summary=summary)
            return summary
        finally:
            journal.close()


def _settle_recipe(recipe: Recipe, run_dir: Path, *, resume: bool) -> None:
    """Store the resolved recipe; on a resume, insist on the one the run was started with."""
    path = run_dir / RECIPE_FILE
    if resume and path.exists():
        changed = recipe.resume_difference(load_recipe(path))
        if changed:
            raise RunError(
                f"{run_dir} was started with another {changed[0]}"
                + (f" (and {len(changed) - 1} more differences)" if len(changed) > 1 else "")
                + f"; resume with the recipe in {path}, or start a new run with --run-dir"
            )
    temporary = run_dir / f".{RECIPE_FILE}.partial"
    temporary.write_text(recipe.to_yaml(), encoding="utf-8")
    temporary.rename(path)


def _last_run_time(events: Path) -> float:
    """The run time of the last whole event line, 0 without one."""
    if not events.exists():
        return 0.0
    with events.open("rb") as file:
        file.seek(max(0, events.stat().st_size - _TAIL_BYTES))
        lines = file.read().splitlines()
    for line in reversed(lines):
        try:
            return float(json.loads(line)["t"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0.0


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "lockstep": version("lockstep-rl"),
    }
