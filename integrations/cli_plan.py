"""`lockstep plan`: who would send what to whom, proven to cover, and how long it would take."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from integrations.cli_errors import InputError
from integrations.cli_output import check_target, write_json

if TYPE_CHECKING:
    from weightplane.cluster_layout import ClusterLayout
    from weightplane.simulate import Simulation

__all__ = ["PLAN_HELP", "plan_command", "plan_mapping", "read_side"]

PLAN_HELP = (
    "Plan a weight transfer on paper: bytes, paths, and the simulated time.\n\n"
    "A side is a layout file (JSON, see docs/planning.md) or a built-in layout of a"
    " trillion-parameter mixture of experts: [bold]moe-1t/trainer:pipeline=8,expert=32[/bold] or"
    " [bold]moe-1t/rollout:tensor=8,expert=16,replicas=1[/bold], with"
    " [bold]moe-1t-fp8[/bold] and [bold]moe-1t-mxfp4[/bold] for other formats, and with any shape"
    " of the model, for example [bold]dense_layers=1[/bold].\n\n"
    "Example: [bold]lockstep plan --from moe-1t/trainer --to moe-1t/rollout --png plan.png[/bold]"
)


@dataclass(frozen=True)
class _Planned:
    simulation: Simulation
    plan_seconds: float


def plan_command(
    source: Annotated[
        str, typer.Option("--from", metavar="LAYOUT", help="What the trainer ranks hold.")
    ],
    destination: Annotated[
        str, typer.Option("--to", metavar="LAYOUT", help="What the rollout ranks need.")
    ],
    chunk_mib: Annotated[
        float, typer.Option("--chunk-mib", help="Size of a chunk to aim at, in MiB.")
    ] = 32.0,
    relay: Annotated[
        bool, typer.Option("--relay/--no-relay", help="Rollout ranks hand chunks on.")
    ] = True,
    allow_unused: Annotated[
        bool, typer.Option("--allow-unused", help="Accept trainer tensors that nobody needs.")
    ] = False,
    ranks_per_host: Annotated[int, typer.Option(help="Ranks of one host.")] = 8,
    nics_per_host: Annotated[int, typer.Option(help="Network cards of one host.")] = 8,
    nic_gbps: Annotated[float, typer.Option(help="Gbit/s of one card.")] = 400.0,
    local_gbps: Annotated[
        float, typer.Option(help="Gbit/s between ranks of one host, per rank.")
    ] = 3200.0,
    hop_us: Annotated[float, typer.Option(help="Latency of one chunk, in microseconds.")] = 20.0,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="Draw the schedule.")
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option("--save", metavar="FILE", help="Write the whole plan, as canonical JSON."),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Also write the result to this file, as JSON."),
    ] = None,
) -> None:
    """`lockstep plan`: see `PLAN_HELP`."""
    from weightplane.plan import PlanSettings, plan
    from weightplane.simulate import Cluster, simulate

    for option, path in (("--png", png), ("--save", save), ("--json", json_file)):
        check_target(option, path)
    settings = PlanSettings(
        chunk_bytes=int(chunk_mib * (1 << 20)),
        relay=relay,
        ranks_per_host=ranks_per_host,
        allow_unused=allow_unused,
    )
    cluster = Cluster(
        ranks_per_host, nics_per_host, nic_gbps * 1e9 / 8, local_gbps * 1e9 / 8, hop_us * 1e-6
    )
    console = Console()
    with console.status("reading the layouts"):
        held, needed = read_side("--from", source), read_side("--to", destination)
    with console.status("planning"):
        begun = time.perf_counter()
        made = plan(held, needed, settings)
        seconds = time.perf_counter() - begun
    planned = _Planned(simulate(made, cluster), seconds)
    _show(planned, console)
    if png is not None:
        from integrations.plan_figure import save_schedule_png

        save_schedule_png(planned.simulation, png)
    if save is not None:
        save.write_bytes(made.to_json())
    if json_file is not None:
        write_json(json_file, plan_mapping(planned.simulation, seconds))


def read_side(option: str, text: str) -> ClusterLayout:
    """The layout that one option names: built in, or a file.

    Raises:
        InputError: there is no such built-in layout or key, or the file cannot be read.
        LayoutError: the file or the values describe no valid layout.
    """
    from weightplane.cluster_layout import ClusterLayout

    name, _, values = text.partition(":")
    model, slash, side = name.partition("/")
    if slash and (model == "moe-1t" or model.startswith("moe-1t-")):
        return _built_in(option, model.removeprefix("moe-1t").lstrip("-") or "bf16", side, values)
    try:
        document = Path(text).read_bytes()
    except OSError as error:
        raise InputError(
            f"{option} {text}: cannot be read ({error.strerror}), and is no built-in layout; "
            "those are moe-1t/trainer, moe-1t/rollout, and the same of moe-1t-fp8 and moe-1t-mxfp4"
        ) from error
    return ClusterLayout.from_json(document)


def plan_mapping(simulation: Simulation, plan_seconds: float) -> dict[str, Any]:
    """A plan and its simulation as plain data."""
    made, sources = simulation.plan, simulation.plan.source.size
    return {
        "digest": made.digest,
        "source_digest": made.source.digest,
        "destination_digest": made.destination.digest,
        "source_ranks": sources,
        "destination_ranks": made.destination.size,
        "tensors": len(made.destination.tensors),
        "cells": len(made.cell_tensor),
        "chunks": len(made.chunk_bytes),
        "hops": len(made.hop_chunk),
        "rounds": made.rounds,
        "wire_bytes": made.wire_bytes,
        "minimum_bytes": made.minimum_bytes,
        "egress_bytes": int(made.egress_bytes[:sources].sum()),
        "minimum_egress_bytes": made.minimum_egress_bytes,
        "egress_max_over_mean": _max_over_mean(made.egress_bytes[:sources].tolist()),
        "ingress_max_over_mean": _max_over_mean(made.ingress_bytes[sources:].tolist()),
        "plan_seconds": plan_seconds,
        "wire_seconds": simulation.seconds,
        "bound_seconds": simulation.bound_seconds,
        "bandwidth_fraction": simulation.bandwidth_fraction,
        "ranks": [
            {"name": made.endpoint_name(endpoint), "sent": sent, "received": received}
            for endpoint, (sent, received) in enumerate(
                zip(made.egress_bytes.tolist(), made.ingress_bytes.tolist(), strict=True)
            )
        ],
    }


def _built_in(option: str, form: str, side: str, values: str) -> ClusterLayout:
    from weightplane.paper_models import (
        FORMATS,
        PaperModel,
        RolloutRanks,
        TrainerRanks,
        rollout_layout,
        trainer_layout,
    )

    if form not in FORMATS or side not in ("trainer", "rollout"):
        raise InputError(
            f"{option}: there is no built-in layout {form!r} / {side!r}; the format is one of "
            f"{', '.join(FORMATS)}, the side trainer or rollout"
        )
    model, ranks = PaperModel(format=form), TrainerRanks() if side == "trainer" else RolloutRanks()
    of_model = {field.name for field in fields(model)} - {"format"}
    of_ranks = {field.name for field in fields(ranks)}
    for pair in filter(None, values.split(",")):
        key, _, value = pair.partition("=")
        if key not in of_model | of_ranks or not value.isdecimal():
            raise InputError(
                f"{option}: {pair!r} is not KEY=NUMBER with one of the keys "
                f"{', '.join(sorted(of_ranks))}, {', '.join(sorted(of_model))}"
            )
        if key in of_ranks:
            ranks = replace(ranks, **{key: int(value)})
        else:
            model = replace(model, **{key: int(value)})
    if isinstance(ranks, TrainerRanks):
        return trainer_layout(model, ranks)
    return rollout_layout(model, ranks)


def _show(planned: _Planned, console: Console) -> None:
    found = plan_mapping(planned.simulation, planned.plan_seconds)
    share = planned.simulation.cluster.network_bytes_per_second
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    rows = (
        ("ranks", f"{found['source_ranks']} trainer to {found['destination_ranks']} rollout"),
        ("tensors, cells", f"{found['tensors']:,}, {found['cells']:,}"),
        ("chunks, hops", f"{found['chunks']:,}, {found['hops']:,} in {found['rounds']:,} rounds"),
        (
            "bytes on the wire",
            f"{found['wire_bytes'] / 1e9:,.2f} GB, {_ratio(found, 'wire_bytes')} x the minimum",
        ),
        (
            "the trainer sends",
            f"{found['egress_bytes'] / 1e9:,.2f} GB, {_ratio(found, 'egress_bytes')} x one copy; "
            f"busiest rank {found['egress_max_over_mean']:.3f} x the mean",
        ),
        ("planned in", f"{found['plan_seconds']:.2f} s"),
        (
            "simulated",
            f"{found['wire_seconds'] * 1e3:,.1f} ms at {share / 1e9:.1f} GB/s per rank; the "
            f"bandwidth bound is {found['bound_seconds'] * 1e3:,.1f} ms "
            f"({found['bandwidth_fraction']:.1%})",
        ),
        ("digest", found["digest"]),
    )
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _ratio(found: dict[str, Any], name: str) -> str:
    """Bytes of one kind over the least possible, in words."""
    least = found[f"minimum_{name}" if name != "wire_bytes" else "minimum_bytes"]
    return f"{found[name] / least:.4f}" if least else "1.0000"


def _max_over_mean(values: list[int]) -> float:
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0
