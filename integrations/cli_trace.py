"""`lockstep trace inspect`: what a routing trace holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from consistency.errors import RoutingTraceError
from consistency.routing_replay import RoutingTrace
from integrations.cli_errors import InputError

__all__ = ["LayerLoad", "describe_trace", "layer_loads", "read_trace", "trace_mapping"]

BLOCKS = " ▁▂▃▄▅▆▇█"
SHOWN_EXPERTS = 64


@dataclass(frozen=True)
class LayerLoad:
    """How the valid tokens of a trace spread over the experts of one layer.

    `imbalance` is the load of the busiest expert over the mean load: 1 is a perfect balance, the
    number of experts divided by topk is the worst.
    """

    layer: int
    counts: tuple[int, ...]
    used: int
    busiest: int
    imbalance: float


def read_trace(file: Path) -> RoutingTrace:
    """The trace in a file.

    Raises:
        InputError: the file cannot be read, or its bytes are no trace or a damaged one.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from error
    try:
        return RoutingTrace.from_bytes(data)
    except RoutingTraceError as error:
        raise InputError(f"{file}: {error}") from error


def layer_loads(trace: RoutingTrace) -> list[LayerLoad]:
    """The load of every MoE layer."""
    ids = trace.expert_ids[trace.valid].to(torch.int64)
    loads = []
    for position, layer in enumerate(trace.layers):
        counts = torch.bincount(ids[:, position].reshape(-1), minlength=trace.experts)
        loads.append(_load(layer, counts))
    return loads


def trace_mapping(trace: RoutingTrace) -> dict[str, Any]:
    """The trace's description as plain data."""
    return {
        "tokens": trace.tokens,
        "valid_tokens": int(trace.valid.sum()),
        "layers": list(trace.layers),
        "experts": trace.experts,
        "topk": trace.topk,
        "dtype": str(trace.expert_ids.dtype).removeprefix("torch."),
        "digest": trace.digest(),
        "weight_versions": list(trace.weight_versions()),
        "segments": [
            {
                "start": part.start,
                "stop": part.stop,
                "weight_version": part.weight_version,
                "origin": str(part.origin),
            }
            for part in trace.segments
        ],
        "load": [
            {
                "layer": load.layer,
                "counts": list(load.counts),
                "used": load.used,
                "busiest": load.busiest,
                "imbalance": load.imbalance,
            }
            for load in layer_loads(trace)
        ],
    }


def describe_trace(trace: RoutingTrace, console: Console) -> None:
    """Prints sizes, segments and the load of the experts per layer."""
    valid = int(trace.valid.sum())
    sizes = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    rows = (
        ("tokens", f"{trace.tokens:,}, of which {trace.tokens - valid:,} without routing"),
        ("MoE layers", f"{len(trace.layers)} (decoder layers {_ranges(trace.layers)})"),
        ("experts", f"{trace.experts}, {trace.topk} per token and layer"),
        ("ids", str(trace.expert_ids.dtype).removeprefix("torch.")),
        ("digest", trace.digest()),
    )
    for row in rows:
        sizes.add_row(*row)
    console.print(sizes)
    segments = Table(
        "\nsegment", "\ntokens", "\nweight version", "\norigin", box=None, pad_edge=False
    )
    for part in trace.segments:
        segments.add_row(
            f"{part.start}:{part.stop}",
            f"{part.stop - part.start:,}",
            str(part.weight_version),
            str(part.origin),
        )
    console.print(segments)
    table = Table("\nlayer", "\nused", "\nbusiest", "\nimbalance", box=None, pad_edge=False)
    shown = trace.experts <= SHOWN_EXPERTS
    if shown:
        table.add_column("\nload per expert")
    for load in layer_loads(trace):
        cells = [
            str(load.layer),
            f"{load.used}/{trace.experts}",
            f"expert {load.busiest}" if load.used else "none",
            f"{load.imbalance:.2f}x",
        ]
        table.add_row(*cells, *([_bars(load.counts)] if shown else []))
    console.print(table)


def _load(layer: int, counts: Tensor) -> LayerLoad:
    total = int(counts.sum())
    busiest = int(counts.argmax()) if counts.numel() else 0
    imbalance = float(counts.max()) * counts.numel() / total if total else 0.0
    return LayerLoad(
        layer=layer,
        counts=tuple(counts.tolist()),
        used=int((counts > 0).sum()),
        busiest=busiest,
        imbalance=imbalance,
    )


def _bars(counts: tuple[int, ...]) -> str:
    """One character per expert, as high as its load; an expert without any load stays blank."""
    top = max(counts, default=0)
    if top == 0:
        return ""
    return "".join(BLOCKS[-(-count * (len(BLOCKS) - 1) // top)] for count in counts)


def _ranges(layers: tuple[int, ...]) -> str:
    """``0-3, 5`` for (0, 1, 2, 3, 5)."""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and layer == parts[-1][1] + 1:
            parts[-1][1] = layer
        else:
            parts.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
