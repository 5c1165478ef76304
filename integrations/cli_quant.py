"""`lockstep quant`: export quantised weights, and audit what an engine's checkpoint holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from integrations.cli_errors import InputError
from integrations.cli_output import check_target, write_json

if TYPE_CHECKING:
    from consistency.quant import CheckpointReader, QuantSettings
    from consistency.quant.audit import MatrixAudit

__all__ = ["quant_app"]

SHOWN_FAILURES = 20

quant_app = typer.Typer(rich_markup_mode="rich", help="Export and audit MXFP4 checkpoints.")

AUDIT_HELP = (
    "Compare an engine's checkpoint with the trainer's weights, matrix by matrix.\n\n"
    "Values are compared, not bytes. Where they differ, the cause is named if it is a known one:"
    " another scale rule, rounding or axis, fp32 instead of bf16, nibbles or rows in another order,"
    " a layer left out. Exit code 1 if any value differs.\n\n"
    "Without [bold]--trainer[/bold], only shows what the checkpoint holds and whether its scales"
    " are numbers.\n\n"
    "Example: [bold]lockstep quant audit served --trainer runs/mxfp4[/bold]"
)
EXPORT_HELP = (
    "Write a checkpoint with MXFP4 weights in the layout that an engine loads.\n\n"
    "SOURCE is the folder of a run whose recipe quantises (what to pack, and how, is then known),"
    " or of an ordinary checkpoint. Example: [bold]lockstep quant export runs/mxfp4 served"
    " --layout compressed-tensors[/bold]"
)

Targets = Literal["experts", "linears"]
GateUp = Literal["stacked", "interleaved"]
Rule = Literal["floor", "even", "rceil", "ceil"]
Layout = Literal["compressed-tensors", "gpt-oss", "deepseek-v4"]

RuleOption = Annotated[
    Rule | None,
    typer.Option("--scale-rule", help="The trainer's rule, if neither a run nor a header says it."),
]
TargetsOption = Annotated[
    Targets | None, typer.Option("--targets", help="Which matrices the trainer quantises.")
]
ExcludeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--exclude", metavar="NAME", help="A matrix that the trainer keeps dense; may be repeated."
    ),
]
GateUpOption = Annotated[
    GateUp,
    typer.Option("--gate-up", help="Order of the rows of dense, stacked gate_up_proj."),
]
JsonOption = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Also write the result to this file, as JSON."),
]


@quant_app.command(name="audit", help=AUDIT_HELP)
def audit_command(
    engine: Annotated[Path, typer.Argument(metavar="ENGINE", help="What the engine loads.")],
    trainer: Annotated[
        Path | None,
        typer.Option("--trainer", metavar="DIR", help="A run, or a checkpoint, packed or dense."),
    ] = None,
    scale_rule: RuleOption = None,
    targets: TargetsOption = None,
    exclude: ExcludeOption = None,
    gate_up: GateUpOption = "stacked",
    json_file: JsonOption = None,
) -> None:
    """`lockstep quant audit`: see `AUDIT_HELP`."""
    from consistency.quant import CheckpointReader
    from consistency.quant.audit import audit, check_packed

    check_target("--json", json_file)
    console = Console()
    with CheckpointReader(engine, gate_up=gate_up) as served:
        if served.layout is None:
            raise InputError(f"{engine}: config.json has no quantization_config; nothing is packed")
        total = len(served.packed_names)
        if trainer is None:
            settings = served.settings
            found = list(track(check_packed(served), "checking", total, transient=True))
        else:
            source = _Source(trainer)
            with CheckpointReader(source.folder, gate_up=gate_up) as trained:
                settings = _settings(scale_rule, source, trained, served)
                records = audit(
                    served,
                    trained,
                    settings,
                    targets=targets or source.targets,
                    exclude={*(exclude or ()), *source.excluded()},
                    engine_layout=served.layout,
                )
                total += len(served.dense_names)
                found = list(track(records, "comparing", total, transient=True))
        facts = {
            "engine": str(engine),
            "trainer": None if trainer is None else str(trainer),
            "layout": served.layout.value,
            "settings": None if settings is None else settings.to_mapping(),
            "engine_settings": None if served.settings is None else served.settings.to_mapping(),
            "passed": all(record.passed for record in found),
        }
    _show(found, facts, console)
    if json_file is not None:
        write_json(json_file, {**facts, "matrices": [asdict(record) for record in found]})
    if not facts["passed"]:
        raise typer.Exit(1)


@quant_app.command(name="export", help=EXPORT_HELP)
def export_command(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A run, or a checkpoint.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A folder that does not exist yet.")],
    layout: Annotated[Layout, typer.Option("--layout", help="Of the packed weights.")],
    scale_rule: RuleOption = None,
    targets: TargetsOption = None,
    exclude: ExcludeOption = None,
    gate_up: GateUpOption = "stacked",
) -> None:
    """`lockstep quant export`: see `EXPORT_HELP`."""
    from consistency.quant import CheckpointLayout, CheckpointReader, export_checkpoint

    origin = _Source(source)
    console = Console()
    with CheckpointReader(origin.folder, gate_up=gate_up) as trained:
        if trained.layout is not None:
            raise InputError(f"{source} is quantised already: export what was trained")
        settings = _settings(scale_rule, origin, trained, None)
        chosen = targets or origin.targets or "experts"
        kept = {*(exclude or ()), *origin.excluded()}
        weights = _weights(trained, settings, chosen, kept, trained_on_qdq=origin.is_quantised)
        kind = CheckpointLayout(layout)
        export_checkpoint(out, weights, trained.config, layout=kind, gate_up=trained.gate_up)
    packed = sum(not hasattr(weight, "dtype") for weight in weights.values())
    console.print(
        f"{out}: {packed} matrices of {len(weights)} tensors packed, {settings.scale_rule.value}, "
        f"{layout}",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )


class _Source:
    """A folder that the command line names: a run, or a checkpoint."""

    def __init__(self, folder: Path) -> None:
        from integrations.trainer.recipe import load_recipe
        from integrations.trainer.run import RECIPE_FILE

        self.folder, self._recipe = folder, None
        if not folder.is_dir():
            raise InputError(f"{folder}: there is no such folder")
        if (folder / RECIPE_FILE).is_file():
            from integrations.trainer.worker_learner import FINAL

            self._recipe = load_recipe(folder / RECIPE_FILE, []).quantisation
            self.folder = folder / FINAL
            if not self.folder.is_dir():
                raise InputError(f"{folder}: the run has not ended, so it has no {FINAL} weights")

    @property
    def is_quantised(self) -> bool:
        """Whether it is a run that trained on QDQ weights."""
        return self._recipe is not None

    @property
    def rule(self) -> Rule | None:
        return None if self._recipe is None else self._recipe.scale_rule

    @property
    def targets(self) -> Targets | None:
        return None if self._recipe is None else self._recipe.targets

    def excluded(self) -> set[str]:
        """Matrices that the run's recipe keeps dense."""
        from integrations.trainer.model.config import ModelConfig
        from integrations.trainer.model.weights import checkpoint_parts

        if self._recipe is None or not self._recipe.exclude:
            return set()
        parts = checkpoint_parts(ModelConfig.load(self.folder))
        return {part.name for name in self._recipe.exclude for part in parts[name]}


def _settings(
    rule: Rule | None, source: _Source, trained: CheckpointReader, served: CheckpointReader | None
) -> QuantSettings:
    from consistency.quant import QuantSettings, ScaleRule

    chosen = rule or source.rule
    if chosen is not None:
        return QuantSettings(scale_rule=ScaleRule(chosen))
    for side in (trained, served):
        if side is not None and side.settings is not None:
            return side.settings
    raise InputError(
        "nothing says how the trainer quantises: give --scale-rule floor, even, rceil or ceil"
    )


def _weights(
    trained: CheckpointReader,
    settings: QuantSettings,
    targets: Targets,
    exclude: set[str],
    *,
    trained_on_qdq: bool,
) -> dict[str, Any]:
    """Every tensor of the checkpoint, the targets packed."""
    import torch

    from consistency.quant import pack, unpack
    from consistency.quant.layouts import is_quantisable

    for name in sorted(exclude - set(trained.dense_names)):
        raise InputError(f"--exclude {name}: the checkpoint has no such tensor; use full names")
    weights: dict[str, Any] = {}
    for name in track(trained.dense_names, "packing", transient=True):
        weight = trained.dense(name)
        if name in exclude or not is_quantisable(name, tuple(weight.shape), targets):
            weights[name] = weight
            continue
        weights[name] = pack(weight, settings, name=name)
        if trained_on_qdq and not torch.equal(unpack(weights[name], dtype=weight.dtype), weight):
            raise InputError(
                f"{name} changes when it is packed, although the run trained on quantised weights: "
                "give neither --scale-rule nor --targets, so that the run's own are used"
            )
    return weights


def _show(found: Sequence[MatrixAudit], facts: dict[str, Any], console: Console) -> None:
    settings = facts["settings"]
    rule = "unknown" if settings is None else settings["scale_rule"]
    console.print(f"{facts['layout']}, scale rule {rule}", highlight=False)
    engine_settings = facts["engine_settings"]
    if engine_settings not in (None, settings):
        console.print(
            f"the checkpoint's own header says {engine_settings['scale_rule']}", highlight=False
        )
    groups = Counter((record.status, record.cause) for record in found)
    table = Table("matrices", "status", "values differ", "max diff", "cause", box=None)
    for (status, cause), count in sorted(groups.items()):
        members = [record for record in found if (record.status, record.cause) == (status, cause)]
        elements = sum(record.elements for record in members)
        differ = sum(record.values_differ for record in members)
        table.add_row(
            f"{count:,}",
            status,
            f"{differ / elements:.3%}" if elements else "",
            f"{max(record.max_abs_diff for record in members):.3g}",
            cause,
        )
    console.print(table)
    failures = [record for record in found if not record.passed]
    if not failures:
        return
    detail = Table("\nmatrix", "\nscales", "\ncodes", "\nvalues", "\nmax diff", box=None)
    for record in failures[:SHOWN_FAILURES]:
        counts = (record.scales_differ, record.codes_differ, record.values_differ)
        cells = (f"{count:,}" for count in counts)
        detail.add_row(record.name, *cells, f"{record.max_abs_diff:.3g}")
    console.print(detail)
    if len(failures) > SHOWN_FAILURES:
        console.print(f"and {len(failures) - SHOWN_FAILURES:,} more; --json names them all")
