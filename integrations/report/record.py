"""Reading a run: from the lines of ``metrics.jsonl`` to one immutable `RunRecord`.

A run directory is read as it is found. The process may have been killed in the middle of a line,
the run may be going on, may have failed, or may have been resumed several times; none of that is an
error. What could not be used is said in `RunRecord.notes`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from integrations.errors import IntegrationError
from integrations.report.summary import summarise
from integrations.report.table import Table, is_number

__all__ = ["EVENTS_FILE", "ReportError", "RunRecord", "load_run", "read_events"]

EVENTS_FILE = "metrics.jsonl"

Status = Literal["finished", "failed", "unfinished"]


class ReportError(IntegrationError, ValueError):
    """There is no run to report on, or nothing in it can be read."""


@dataclass(frozen=True)
class RunRecord:
    """Everything a report needs to know about one run.

    `steps` holds one row per weight version: where a resumed run trained a version again, the last
    training counts. `attempts_of_steps` keeps every row, because the time was spent all the same.
    """

    name: str
    folder: Path
    recipe: Mapping[str, Any]
    contract: str
    versions: Mapping[str, str]
    parameters: int | None
    model_bytes: int | None
    status: Status
    reason: str | None
    started_wall: float | None
    duration: float
    resumed_at: tuple[float, ...]
    steps: Table
    attempts_of_steps: Table
    evaluations: Table
    commits: Table
    rollouts: Table
    checkpoints: Table
    warm_start: Table
    samples: Table
    replay_diverged: tuple[int, ...]
    summary: Mapping[str, Any]
    notes: tuple[str, ...]

    @cached_property
    def swaps(self) -> Table:
        """Commits into a serving engine; the very first weights replace nothing."""
        return self.commits.where(self.commits.column("version") > 0)

    @cached_property
    def audited(self) -> Table:
        """The versions whose drift was measured; zeros of a step without an audit mean nothing."""
        measured = np.isfinite(self.steps.column("k3_kl"))
        return self.steps.where(measured & (self.steps.column("audited_tokens") != 0))

    @cached_property
    def drift_is_zero(self) -> bool:
        """Whether drift was measured at all and every measured value is exactly 0."""
        if len(self.audited) == 0:
            return False
        values = [self.audited.column(name) for name in ("k3_kl", "mean_abs_diff", "max_abs_diff")]
        flips = self.audited.column("router_flip_rate")
        return all(bool((column == 0).all()) for column in values) and not bool((flips > 0).any())

    @cached_property
    def staleness_limit(self) -> int | None:
        """`staleness.max` of the recipe, where it is stated."""
        section = self.recipe.get("staleness")
        limit = section.get("max") if isinstance(section, Mapping) else None
        return limit if isinstance(limit, int) else None


def read_events(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Reads a file of JSON lines.

    Returns:
        the events in the order of the file, and one note for people per kind of damage.

    Raises:
        ReportError: the file does not exist, cannot be read, or holds no event.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise ReportError(f"{path.parent}: no {path.name} there, so no run to report on") from None
    except OSError as error:
        raise ReportError(f"{path}: cannot be read ({error.strerror})") from error
    events: list[dict[str, Any]] = []
    unreadable = 0
    for line in lines:
        if not line.strip():
            continue
        try:
            event = json.loads(line)
        except ValueError:  # also raised for bytes that are not UTF-8
            unreadable += 1
            continue
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            events.append(event)
        else:
            unreadable += 1
    if not events:
        raise ReportError(f"{path}: holds no event yet; start the run, or wait until it has begun")
    notes = []
    if unreadable:
        subject = "1 line" if unreadable == 1 else f"{unreadable:,} lines"
        notes.append(
            f"{subject} of {path.name} could not be read and had to be left out (a process that is"
            " killed while it writes leaves such a line behind)."
        )
    return events, notes


def load_run(run_dir: Path | str) -> RunRecord:
    """Reads the run in `run_dir`.

    Raises:
        ReportError: `run_dir` does not exist or holds no event.
    """
    folder = Path(run_dir)
    if not folder.is_dir():
        raise ReportError(f"{folder}: no such directory; give the run_dir of a recipe")
    events, notes = read_events(folder / EVENTS_FILE)
    return _record(folder, events, notes)


def _record(folder: Path, events: Sequence[dict[str, Any]], notes: list[str]) -> RunRecord:
    tables = {
        name: Table(event for event in events if event["event"] == name)
        for name in ("run_started", "model", "step", "evaluation", "swap", "rollout", "checkpoint",
                     "warm_start", "sample")
    }  # fmt: skip
    starts = tables["run_started"].rows
    first: Mapping[str, Any] = starts[-1] if starts else {}
    models = tables["model"].rows
    model: Mapping[str, Any] = models[-1] if models else first
    recipe = _recipe(folder, first)
    times = _finite(event.get("t") for event in events)
    walls = _finite(event.get("wall") for event in events)
    status, reason, finished = _outcome(events)
    steps, commits = tables["step"].last_per("version"), tables["swap"]
    resumed_at = tuple(_finite(row.get("t") for row in starts if row.get("resumed")))
    replaced = len(tables["step"]) - len(steps)
    if replaced:
        noun = "version was" if replaced == 1 else "versions were"
        notes.append(
            f"{replaced} {noun} trained again after a resume; the plots against weight version show"
            " the last training, the time line shows all of them."
        )
    computed = summarise(
        steps=steps,
        evaluations=tables["evaluation"],
        swaps=commits.where(commits.column("version") > 0),
        rollouts=tables["rollout"],
    )
    if resumed_at:  # the summary of the last attempt knows nothing of the ones before it
        summary = {
            **finished,
            **{key: value for key, value in computed.items() if value is not None},
        }
    else:
        summary = {**computed, **finished}
    return RunRecord(
        name=str(recipe.get("name") or folder.resolve().name),
        folder=folder,
        recipe=recipe,
        contract=str(first.get("contract") or ""),
        versions={str(key): str(value) for key, value in _mapping(first.get("versions")).items()},
        parameters=_integer(model.get("parameters")),
        model_bytes=_integer(model.get("model_bytes")),
        status=status,
        reason=reason,
        started_wall=min(walls) if walls else None,
        duration=max(times) if times else 0.0,
        resumed_at=resumed_at,
        steps=steps,
        attempts_of_steps=tables["step"],
        evaluations=tables["evaluation"].last_per("version").sorted_by("version"),
        commits=commits,
        rollouts=tables["rollout"],
        checkpoints=tables["checkpoint"],
        warm_start=tables["warm_start"],
        samples=tables["sample"],
        replay_diverged=tuple(
            event["step"]
            for event in events
            if event["event"] == "replay_diverged" and isinstance(event.get("step"), int)
        ),
        summary=summary,
        notes=tuple(notes),
    )


def _outcome(events: Sequence[dict[str, Any]]) -> tuple[Status, str | None, Mapping[str, Any]]:
    """How the last attempt ended: status, the reason of a failure, the summary of a success."""
    for event in reversed(events):
        match event["event"]:
            case "run_finished":
                return "finished", None, _mapping(event.get("summary"))
            case "run_failed":
                return "failed", str(event.get("reason") or "no reason given"), {}
            case "run_started":
                break
    return "unfinished", None, {}


def _recipe(folder: Path, started: Mapping[str, Any]) -> Mapping[str, Any]:
    """The recipe that the run recorded, else the file that lies beside its events."""
    recorded = started.get("recipe")
    if isinstance(recorded, Mapping):
        return recorded
    text = recorded if isinstance(recorded, str) else None
    if text is None and (folder / "recipe.yaml").is_file():
        text = (folder / "recipe.yaml").read_text(encoding="utf-8", errors="replace")
    try:
        return _mapping(yaml.safe_load(text)) if text is not None else {}
    except yaml.YAMLError:
        return {}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _finite(values: Iterable[object]) -> list[float]:
    return [float(value) for value in values if is_number(value)]
