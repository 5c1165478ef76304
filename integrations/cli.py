"""The ``lockstep`` command.

Every command prints a table for people, writes ``--json FILE`` for machines, and ends with exit
code 0, with 2 and one line on stderr after bad input, with 1 and one line after a failure, or with
130 after Ctrl-C. Imports of anything slow happen inside the commands.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from integrations.cli_errors import InputError, Invocation, exit_code, is_expected, one_line
from integrations.cli_output import check_target, write_json
from integrations.cli_plan import PLAN_HELP, plan_command
from integrations.cli_quant import quant_app

__all__ = ["app", "main"]

app = typer.Typer(
    name="lockstep",
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
trace = typer.Typer(rich_markup_mode="rich", help="Look into routing traces.")
app.add_typer(trace, name="trace")
app.add_typer(quant_app, name="quant")
app.command(name="plan", help=PLAN_HELP)(plan_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(f"lockstep {version('lockstep-rl')}")
        except PackageNotFoundError:
            typer.echo("lockstep, run from its sources without being installed")
        raise typer.Exit


def _set_debug(context: typer.Context, wanted: bool) -> bool:
    if wanted and isinstance(context.obj, Invocation):
        context.obj.debug = True
    return wanted


JsonOption = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Also write the result to this file, as JSON."),
]
TRAIN_HELP = (
    "Train asynchronously by a recipe, and write a report.\n\n"
    "The run directory gets metrics.jsonl, TensorBoard events, checkpoints and report.html."
    " A run that was stopped, killed or failed goes on with [bold]--resume[/bold].\n\n"
    "Example: [bold]lockstep train recipes/quickstart.yaml learner.steps=20"
    " --run-dir runs/short[/bold]"
)
DOCTOR_HELP = (
    "Show what is installed, which ways of training that enables, and test them.\n\n"
    "The compiled kernels and the weight plane are run for real on small data. The exit code is 0"
    " unless the embedded engine and learner cannot work here."
)

DebugOption = Annotated[
    bool,
    typer.Option(
        "--debug", callback=_set_debug, help="Show the traceback of an error.", show_default=False
    ),
]


@app.callback(invoke_without_command=True)
def lockstep(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Keep an LLM's trainer and its rollout engines in lockstep during reinforcement learning."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command(help=DOCTOR_HELP)
def doctor(
    kernels: Annotated[
        bool,
        typer.Option(
            "--kernels",
            help="Test instead that every kernel keeps its bits, with adverse data.",
            show_default=False,
        ),
    ] = False,
    json_file: JsonOption = None,
    debug: DebugOption = False,
) -> None:
    """`lockstep doctor`: see `DOCTOR_HELP`."""
    from integrations.doctor import examine
    from integrations.doctor_view import show

    check_target("--json", json_file)
    if kernels:
        _doctor_kernels(json_file)
        return
    diagnosis = examine()
    show(diagnosis, Console())
    if json_file is not None:
        write_json(json_file, diagnosis.to_mapping())
    if not diagnosis.embedded_works:
        raise typer.Exit(1)


def _doctor_kernels(json_file: Path | None) -> None:
    from integrations.doctor_kernels import as_mapping, check_kernels, show_kernels

    checks = check_kernels()
    show_kernels(checks, Console())
    if json_file is not None:
        write_json(json_file, as_mapping(checks))
    if not all(check.passed for check in checks):
        raise typer.Exit(1)


@app.command(help=TRAIN_HELP)
def train(
    context: typer.Context,
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Values that replace the recipe's, e.g. [bold]learner.steps=20[/bold].",
            show_default=False,
        ),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", metavar="DIR", help="Where to write; replaces run_dir."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run that run_dir holds.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Move a run that run_dir holds aside and start anew.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved recipe as YAML and stop.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
    json_file: JsonOption = None,
    debug: DebugOption = False,
) -> None:
    """`lockstep train`: see `TRAIN_HELP`."""
    from integrations.cli_train import print_recipe, run_training
    from integrations.trainer.recipe import load_recipe

    check_target("--json", json_file)
    if resume and fresh:
        raise InputError("--resume goes on with a run and --fresh starts anew: give one of them")
    given = list(overrides or ())
    # Quoted, because the value of an override is YAML and a folder may be called 1e3 or yes.
    chosen = [] if run_dir is None else [f"run_dir={json.dumps(str(run_dir))}"]
    loaded = load_recipe(recipe, [*given, *chosen])
    if dry_run:
        print_recipe(loaded)
        if json_file is not None:
            write_json(json_file, loaded.to_mapping())
        return
    command = ["lockstep", "train", str(recipe), *given]
    if run_dir is not None:
        command += ["--run-dir", str(run_dir)]
    summary = run_training(
        loaded,
        resume=resume,
        fresh=fresh,
        quiet=quiet,
        command=command,
        invocation=_invocation(context),
    )
    if json_file is not None:
        write_json(json_file, summary)


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run_dir of a recipe.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="The page; RUN_DIR/report.html when left out."),
    ] = None,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="Also draw one compact picture.")
    ] = None,
    json_file: JsonOption = None,
    debug: DebugOption = False,
) -> None:
    """Draw a run as one self-contained HTML page.

    Works on runs that finished, failed, were resumed or are still going on.
    """
    from integrations.cli_output import describe_run, run_mapping
    from integrations.report import load_run, save_overview_png, save_report

    for option, path in (("--json", json_file), ("--out", out), ("--png", png)):
        check_target(option, path)
    console = Console()
    run = load_run(run_dir)
    with console.status("drawing"):
        page = save_report(run, out)
        if png is not None:
            save_overview_png(run, png)
    describe_run(run, console)
    console.print(f"report: {page}", soft_wrap=True, markup=False, highlight=False)
    if json_file is not None:
        write_json(json_file, {"report": str(page), **run_mapping(run)})


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    },
)
def bench(
    context: typer.Context,
    what: Annotated[str, typer.Argument(metavar="WHAT", help="For example sync or kernels.")],
) -> None:
    """Measure on this machine, peers beside us; `lockstep bench sync --help` names its options.

    The measurements are programs of their own, because nothing in Lockstep may import them.
    """
    from integrations.cli_bench import run_bench

    raise typer.Exit(run_bench(what, context.args))


@trace.command()
def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The bytes of a RoutingTrace.")],
    json_file: JsonOption = None,
    debug: DebugOption = False,
) -> None:
    """Show what a routing trace holds: sizes, segments, and the load of the experts per layer."""
    from integrations.cli_trace import describe_trace, read_trace, trace_mapping

    check_target("--json", json_file)
    loaded = read_trace(file)
    describe_trace(loaded, Console())
    if json_file is not None:
        write_json(json_file, {"file": str(file), **trace_mapping(loaded)})


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    invocation = Invocation()
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        result = app(args=given, prog_name="lockstep", obj=invocation, standalone_mode=False)
    except Exception as error:  # every kind ends here; what nobody expected keeps its traceback
        if not is_expected(error):
            raise
        if invocation.debug:
            traceback.print_exception(error)
        typer.echo(f"lockstep: {one_line(error)}", err=True)
        return exit_code(error, invocation)
    return result if isinstance(result, int) else 0


def _invocation(context: typer.Context) -> Invocation:
    return context.obj if isinstance(context.obj, Invocation) else Invocation()


if __name__ == "__main__":
    sys.exit(main())
