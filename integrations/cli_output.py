"""What the commands have in common when they speak: JSON files, and a run as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from integrations.cli_errors import InputError

if TYPE_CHECKING:
    from integrations.report import RunRecord

__all__ = ["check_target", "describe_run", "run_mapping", "write_json"]


def check_target(option: str, path: Path | None) -> None:
    """Refuses a file that could not be written, before hours of work are spent.

    Raises:
        InputError: the folder does not exist, or the path is a folder.
    """
    if path is None:
        return
    if path.is_dir():
        raise InputError(f"{option} {path}: is a folder; name a file")
    if not path.absolute().parent.is_dir():
        raise InputError(f"{option} {path}: the folder {path.parent} does not exist")


def write_json(path: Path, data: Mapping[str, Any] | Sequence[Any]) -> None:
    """Writes valid JSON: NaN and infinity become null.

    Raises:
        OSError: the file cannot be written.
    """
    from integrations.trainer.observers.jsonl import plain

    text = json.dumps(plain(data), indent=2, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def describe_run(run: RunRecord, console: Console) -> None:
    """Prints the headline of a run, its key figures, and what needs attention."""
    from integrations.report.facts import attention, headline, tiles

    console.print(f"[bold]{escape(run.name)}[/bold]  {run.status}")
    console.print(headline(run), markup=False, highlight=False)
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    colours = {"good": "green", "bad": "red", "plain": "bold"}
    for tile in tiles(run):
        value = f"{tile.value} {tile.unit}".rstrip()
        colour = colours[tile.tone]
        table.add_row(
            tile.label, f"[{colour}]{escape(value)}[/{colour}]", f"[dim]{escape(tile.detail)}[/dim]"
        )
    console.print(table)
    for text in (*attention(run), *run.notes):
        console.print(f"[yellow]![/yellow] {escape(text)}", highlight=False)


def run_mapping(run: RunRecord) -> dict[str, Any]:
    """A run as plain data: how it ended, its summary, and what needs attention."""
    from integrations.report.facts import attention

    return {
        "name": run.name,
        "run_dir": str(run.folder),
        "status": run.status,
        "reason": run.reason,
        "contract": run.contract,
        "versions": dict(run.versions),
        "seconds": run.duration,
        "resumed": len(run.resumed_at),
        "weight_versions": len(run.steps),
        "drift_is_zero": run.drift_is_zero,
        "summary": dict(run.summary),
        "attention": attention(run),
        "notes": list(run.notes),
    }
