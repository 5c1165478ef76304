"""`lockstep bench divergence`: how far apart two engines are, stock and in lockstep."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.divergence.measure import Measured, Row, measure
from bench.divergence.plot import save_plot
from bench.divergence.rollout import Job
from bench.divergence.scenarios import SCENARIOS, Workload
from integrations.cli_errors import Invocation, exit_code, is_expected, one_line
from integrations.cli_output import check_target, write_json
from integrations.errors import BenchError
from integrations.trainer.model.config import ModelConfig
from integrations.vllm.options import OPERATIONS

__all__ = ["app", "main"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class RolloutName(StrEnum):
    """Rollout engines."""

    vllm = "vllm"
    embedded = "embedded"


class TrainName(StrEnum):
    """Trainers."""

    transformers = "transformers"
    embedded = "embedded"
    megatron = "megatron"


@app.command()
def divergence(
    model: Annotated[Path, typer.Option("--model", metavar="DIR", help="A checkpoint folder.")],
    rollout: Annotated[RolloutName, typer.Option(help="Who samples.")] = RolloutName.vllm,
    train: Annotated[TrainName, typer.Option(help="Who scores.")] = TrainName.transformers,
    scenario: Annotated[
        list[str] | None, typer.Option(help="One of the eight; may be given again. [all]")
    ] = None,
    requests: Annotated[int, typer.Option(min=2, help="Requests per scenario.")] = 16,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to sample per request.")] = 64,
    stock: Annotated[bool, typer.Option(help="Also measure the engines without Lockstep.")] = True,
    train_ranks: Annotated[
        int, typer.Option(min=1, help="Tensor-parallel ranks of megatron; both tp_invariant.")
    ] = 1,
    without: Annotated[
        list[str] | None,
        typer.Option(metavar="OPERATION", help="Leave it to the rollout engine's own kernel."),
    ] = None,
    locate: Annotated[
        bool, typer.Option("--locate", help="Name the first operation and layer that differs.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw per-token differences, PNG or SVG.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the rows as JSON.")
    ] = None,
) -> int:
    """Compare the log-probabilities of sampled tokens between a rollout engine and a trainer.

    The exit code is 1 when a row in lockstep is not exactly equal.

    Example: lockstep bench divergence --rollout vllm --train transformers --model models/mine
    """
    for option, path in (("--json", json_file), ("--plot", plot)):
        check_target(option, path)
    names = list(scenario or SCENARIOS)
    for name in names:
        if name not in SCENARIOS:
            raise BenchError(f"--scenario {name!r} does not exist: use {', '.join(SCENARIOS)}")
    removed = list(without or ())
    for name in removed:
        if name not in OPERATIONS:
            raise BenchError(f"--without {name!r} does not exist: use {', '.join(OPERATIONS)}")
    if removed and rollout is not RolloutName.vllm:
        raise BenchError(
            f"--without {removed[0]}: the {rollout.value} engine has the contract only"
        )
    if locate and (rollout is not RolloutName.vllm or train is TrainName.embedded):
        raise BenchError("--locate compares vllm with transformers or megatron: choose these")
    if train_ranks > 1 and (train is not TrainName.megatron or locate):
        raise BenchError(
            f"--train-ranks {train_ranks}: only megatron has ranks, and --locate looks at one"
        )
    config = ModelConfig.load(model)
    longest = min(72, config.max_positions - tokens)
    if longest < 40:
        raise BenchError(
            f"--tokens {tokens}: the model has {config.max_positions} positions, which leaves "
            f"{longest} for a prompt; 40 are needed"
        )
    workload = Workload.random(
        config.vocab_size, requests=requests, shortest=40, longest=longest, answer=tokens, seed=0
    )
    kept = [name for name in OPERATIONS if name not in removed]

    def job(operations: list[str] | None) -> Job:
        prompts = [list(prompt) for prompt in workload.prompts]
        whole = train_ranks > 1
        return Job(str(model), names, operations, prompts, workload.answer, workload.seed, whole)

    console = Console()
    measured: list[Measured] = []
    with console.status("starting") as status:
        if stock and rollout is RolloutName.vllm:
            measured += measure(
                rollout.value, train.value, job(None), None, status.update, train_ranks=train_ranks
            )
        measured += measure(
            rollout.value,
            train.value,
            job(kept),
            list(OPERATIONS),
            status.update,
            train_ranks=train_ranks,
        )
        found = None
        if locate:
            from bench.divergence.capture import locate as find

            status.update("looking for the first difference")
            found = find(job(kept), list(OPERATIONS), train.value)
    _show(console, [item.row for item in measured], f"{rollout.value} against {train.value}")
    if locate:
        console.print("first difference: " + (str(found) if found else "none"), markup=False)
    if json_file is not None:
        write_json(json_file, [item.row.as_dict() for item in measured])
    if plot is not None:
        save_plot(plot, measured, f"{rollout.value} against {train.value}")
    equal = all(item.row.exact_fraction == 1.0 for item in measured if item.row.contract != "stock")
    return 0 if equal and found is None else 1


def _show(console: Console, rows: Sequence[Row], title: str) -> None:
    table = Table(title=title)
    columns = (
        "scenario",
        "contract",
        "tokens",
        "exact",
        "mean |d|",
        "max |d|",
        "k3",
        "ess",
        "flips",
    )
    for column in columns:
        table.add_column(column, justify="left" if column in ("scenario", "contract") else "right")
    for row in rows:
        table.add_row(
            row.scenario,
            row.contract[:12],
            str(row.tokens),
            f"{row.exact_fraction:.4f}",
            *(f"{value:.3g}" for value in (row.mean_abs_diff, row.max_abs_diff, row.k3_kl)),
            f"{row.ess:.6f}",
            f"{row.router_flip_rate:.4f}",
        )
    console.print(table)


def main() -> int:
    """Runs the command line; errors that say what is wrong are one line."""
    try:
        result = app(prog_name="lockstep bench divergence", standalone_mode=False)
    except Exception as error:  # what nobody expected keeps its traceback
        if not is_expected(error):
            raise
        typer.echo(f"lockstep: {one_line(error)}", err=True)
        return exit_code(error, Invocation())
    return result if isinstance(result, int) else 0
