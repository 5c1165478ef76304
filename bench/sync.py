"""`lockstep bench sync`: how fast new weights reach engines, against what the machine can do.

A learner in this process and engines in processes of their own; every version is timed from the
call of `Publisher.publish` to the commit in the last engine, digests on both sides included. The
reference is one thread's memcpy for shared memory and one TCP stream over loopback for transports
that use a network, both measured in this run; the peers move the same state dict.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.sync_models import MODELS, Learner, changed_bytes
from bench.sync_plot import save_plot
from bench.sync_references import loopback_rate, memcpy_rate, peer_seconds
from weightplane import (
    Channel,
    Layout,
    Publisher,
    TransportUnavailableError,
    WeightPlaneError,
    channel_pair,
    tensor_digest,
)
from weightplane.p2p.readers import TRANSPORTS, make_transport
from weightplane.slots import slot_bytes

PEERS = ("gloo broadcast", "safetensors")
LEARNING_RATE = 1e-6


class Engine:
    """A rollout engine in a process of its own."""

    def __init__(self, layout: Layout, share: bool) -> None:
        ours, theirs = channel_pair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.sync_engine", str(theirs.fileno()), str(int(share))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self.channel = Channel(ours)
        self._write(layout.to_json() + b"\n")

    def answer(self) -> Any:
        """The next JSON line; lines of native libraries are passed over."""
        if self._process.stdout is None:
            raise RuntimeError("the engine has no output")
        for line in self._process.stdout:
            if line.startswith((b"[", b"{")):
                return json.loads(line)
        raise RuntimeError(f"an engine ended with {self._process.wait()}")

    def digests(self) -> dict[str, str]:
        """What it serves now."""
        self._write(b"digests\n")
        return self.answer()

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _write(self, data: bytes) -> None:
        if self._process.stdin is None:
            raise RuntimeError("the engine has no input")
        self._process.stdin.write(data)
        self._process.stdin.flush()


@contextmanager
def cluster(
    layout: Layout, transport: str, deltas: bool, replicas: int
) -> Iterator[tuple[Publisher, list[Engine]]]:
    """A publisher here and engines that have joined it."""
    made = make_transport(transport, slot_bytes(layout, deltas), 4 if transport == "shm" else 2)
    engines: list[Engine] = []
    with Publisher(layout, transport=made, deltas=deltas, stall_seconds=120) as publisher:
        try:
            for _ in range(replicas):
                # A delta is against a copy of the engine's own.
                engines.append(Engine(layout, share=not deltas))
                publisher.attach(engines[-1].channel)
            publisher.wait_subscribers(replicas, 120)
            yield publisher, engines
        finally:
            for engine in engines:
                engine.close()


def measure(
    learner: Learner, transport: str, mode: str, replicas: int, versions: int
) -> dict[str, Any]:
    """One row: ``versions`` updates after one that warms buffers, registrations and pages up."""
    layout = learner.layout
    seconds, pauses, moved, minimum = [], [], 0, 0
    with cluster(layout, transport, mode == "delta", replicas) as (publisher, engines):
        before = learner.state()
        for number in range(versions + 2):
            if mode == "delta":
                learner.step()
            state = learner.state()
            begun = time.monotonic()
            publisher.publish(state, number)
            answers = [engine.answer() for engine in engines]
            if any(answer[0] != number for answer in answers):
                raise RuntimeError(f"an engine committed {answers} when {number} was published")
            if number >= 2:
                seconds.append(max(answer[1] for answer in answers) - begun)
                pauses.append(max(answer[2] for answer in answers))
                moved = sum(answer[3] for answer in answers)
                if mode == "delta":
                    minimum = changed_bytes(before, state)[0] * replicas
            before = state
        expected = {name: tensor_digest(tensor) for name, tensor in before.items()}
        for engine in engines:
            if engine.digests() != expected:
                raise RuntimeError(f"an engine serves other bits over {transport}")
    return {
        "peer": "",
        "transport": transport,
        "mode": mode,
        "replicas": replicas,
        "bytes": moved,
        "minimum_bytes": minimum or layout.byte_count * replicas,
        "seconds": statistics.median(seconds),
        "pause_seconds": max(pauses),
        "version": versions + 1,
    }


def measure_peer(learner: Learner, kind: str, replicas: int, versions: int) -> dict[str, Any]:
    """One row of a peer. It stops the engine for all of the update, so that is its pause."""
    seconds = peer_seconds(kind, learner.state(), replicas, versions + 1)[1:]
    return {
        "peer": kind,
        "transport": "gloo" if kind == "gloo broadcast" else "file",
        "mode": "full",
        "replicas": replicas,
        "bytes": learner.layout.byte_count * replicas,
        "minimum_bytes": learner.layout.byte_count * replicas,
        "seconds": statistics.median(seconds),
        "pause_seconds": max(seconds),
        "version": versions,
    }


def run(arguments: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Every combination asked for; a transport that cannot run here is named and left out."""
    rows: list[dict[str, Any]] = []
    for model in arguments.models:
        learner = Learner(MODELS[model](), LEARNING_RATE)
        size = learner.layout.byte_count
        rates = {"memcpy": memcpy_rate(size), "loopback": loopback_rate(size)}
        console.print(
            f"{model}: {size / 1e6:.0f} MB, {len(learner.layout.tensors)} tensors; one thread's "
            f"memcpy {rates['memcpy'] / 1e9:.2f} GB/s, one loopback stream "
            f"{rates['loopback'] / 1e9:.2f} GB/s",
            highlight=False,
        )
        work = [
            (name, mode, replicas)
            for name in arguments.transports
            for mode in arguments.modes
            for replicas in arguments.replicas
        ]
        for name, mode, replicas in work:
            try:
                row = measure(learner, name, mode, replicas, arguments.versions)
            except TransportUnavailableError as error:
                console.print(f"left out: {error}", highlight=False)
                continue
            rows.append(_finish(row, model, size, rates))
            show_row(rows[-1], console)
        for kind in arguments.peers:
            for replicas in arguments.replicas:
                row = measure_peer(learner, kind, replicas, arguments.versions)
                rows.append(_finish(row, model, size, rates))
                show_row(rows[-1], console)
    return rows


def _finish(row: dict[str, Any], model: str, size: int, rates: dict[str, float]) -> dict[str, Any]:
    reference = "memcpy" if row["transport"] in ("shm", "cuda_ipc", "file") else "loopback"
    # Replicas share the memory and the processors of this one machine.
    rate = size * row["replicas"] / row["seconds"]
    return {
        **row,
        "model": model,
        "model_bytes": size,
        "reference": reference,
        "reference_rate": rates[reference],
        "bandwidth_fraction": rate / rates[reference],
    }


def show_row(row: dict[str, Any], console: Console) -> None:
    """One line while the run goes on."""
    console.print(
        f"  {row['peer'] or row['transport']:<15} {row['mode']:<6} x{row['replicas']}  "
        f"{row['seconds'] * 1e3:8.1f} ms",
        highlight=False,
    )


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """The table."""
    table = Table(title="publish to committed everywhere, medians")
    columns = ("model", "way", "mode", "replicas", "MB moved", "ms", "pause ms", "of reference")
    for column in columns:
        table.add_column(column, justify="left" if column in columns[:3] else "right")
    for row in rows:
        table.add_row(
            row["model"],
            row["peer"] or row["transport"],
            row["mode"],
            str(row["replicas"]),
            f"{row['bytes'] / 1e6:.1f}",
            f"{row['seconds'] * 1e3:.1f}",
            f"{row['pause_seconds'] * 1e3:.2f}",
            f"{row['bandwidth_fraction']:.2f} {row['reference']}",
        )
    console.print(table)


def _choice(known: Sequence[str], what: str) -> Any:
    def parse(text: str) -> list[str]:
        chosen = [item for item in text.split(",") if item]
        for item in chosen:
            if item not in known:
                raise argparse.ArgumentTypeError(f"{what} {item!r}; use {', '.join(known)}")
        return chosen

    return parse


def _counts(text: str) -> list[int]:
    counts = [int(item) for item in text.split(",")]
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError(f"replicas {text!r}; use numbers from 1 on, as 1,2,4")
    return counts


def parser() -> argparse.ArgumentParser:
    """The options of `lockstep bench sync`."""
    options = argparse.ArgumentParser(prog="lockstep bench sync", description=__doc__)
    options.add_argument("--models", type=_choice(list(MODELS), "model"), default=list(MODELS))
    options.add_argument(
        "--transports",
        type=_choice(list(TRANSPORTS), "transport"),
        default=list(TRANSPORTS),
    )
    options.add_argument(
        "--modes", type=_choice(["full", "delta"], "mode"), default=["full", "delta"]
    )
    options.add_argument("--replicas", type=_counts, default=[1, 2, 4])
    options.add_argument("--peers", type=_choice(PEERS, "peer"), default=list(PEERS))
    options.add_argument("--versions", type=int, default=5, help="timed updates per row")
    options.add_argument("--json", type=Path, metavar="FILE")
    options.add_argument("--plot", type=Path, metavar="FILE")
    return options


def main(given: Sequence[str] | None = None) -> int:
    """Run from the command line; returns the exit code."""
    options = parser()
    arguments = options.parse_args(given)
    if arguments.versions < 1:
        options.error(f"--versions {arguments.versions}; use 1 or more")
    torch.set_num_threads(1)
    console = Console(width=None if sys.stdout.isatty() else 110)
    try:
        rows = run(arguments, console)
    except WeightPlaneError as error:
        print(f"lockstep bench sync: {error}", file=sys.stderr)
        return 1
    show(rows, console)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    if arguments.plot is not None and rows:
        save_plot(rows, arguments.plot)
        console.print(f"plot: {arguments.plot}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
