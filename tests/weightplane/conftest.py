"""Fixtures of the weight plane's tests: small states, joined pairs and subscriber processes."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from weightplane import Channel, Layout, Publisher, Subscriber, channel_pair

ROOT = Path(__file__).parents[2]
State = dict[str, torch.Tensor]


def make_state(seed: int, rows: int = 8) -> State:
    """A model in miniature: bf16 projections, an fp32 router, a scalar and an empty tensor."""
    generator = torch.Generator().manual_seed(seed)
    state: State = {
        f"layers.{layer}.weight": torch.randn(rows, 16, generator=generator).bfloat16()
        for layer in range(4)
    }
    state["layers.0.router"] = torch.randn(4, 16, generator=generator)
    state["embedding"] = torch.randn(rows * 4, 16, generator=generator).bfloat16()
    state["scale"] = torch.tensor(float(seed))
    state["empty"] = torch.empty(0, 16)
    return state


@pytest.fixture
def state() -> Callable[..., State]:
    return make_state


@pytest.fixture
def layout() -> Layout:
    return Layout.of(make_state(0))


@pytest.fixture
def same() -> Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], bool]:
    """Whether two states have the same names and, tensor by tensor, the same bits."""

    def compare(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
        return left.keys() == right.keys() and all(
            torch.equal(left[name], right[name]) for name in left
        )

    return compare


@pytest.fixture
def publisher(layout: Layout) -> Iterator[Publisher]:
    # Two slots, so that subscribers are asked for theirs in many a test.
    with Publisher(layout, slots=2, stall_seconds=5.0) as publisher:
        yield publisher


@pytest.fixture
def join(layout: Layout) -> Iterator[Callable[..., Subscriber]]:
    """Attach another subscriber, in this process, to a publisher."""
    joined: list[Subscriber] = []

    def attach(publisher: Publisher, **options: Any) -> Subscriber:
        ours, theirs = channel_pair()
        publisher.attach(Channel(ours))
        options.setdefault("name", f"engine-{len(joined)}")
        # A reader of the test's own is to be read from.
        options.setdefault("share", "readers" not in options)
        subscriber = Subscriber(Channel(theirs), options.pop("layout", layout), **options)
        joined.append(subscriber)
        return subscriber

    yield attach
    for subscriber in joined:
        subscriber.close()


class EngineProcess:
    """A subscriber in a process of its own, driven by JSON lines."""

    def __init__(self, layout: Layout, *options: str) -> None:
        ours, theirs = channel_pair()
        script = Path(__file__).with_name("engine_process.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), str(theirs.fileno()),
             *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        theirs.close()
        self.channel = Channel(ours)
        self.pid = self._process.pid
        self._write(layout.to_json())

    def ask(self, command: str, timeout: float = 60.0, **arguments: Any) -> Any:
        """Run a command in the process and return its answer."""
        self._write(json.dumps({"command": command, **arguments}).encode())
        return self.answer(timeout)

    def answer(self, timeout: float = 60.0) -> Any:
        """The next line of the process."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout)
        if not ready:
            pytest.fail(f"the engine process did not answer in {timeout} seconds")
        line = self._process.stdout.readline()
        if not line:
            pytest.fail(f"the engine process ended with {self._process.wait(5)}")
        return json.loads(line)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + b"\n")
        self._process.stdin.flush()


@pytest.fixture
def engine() -> Iterator[Callable[..., EngineProcess]]:
    """Start engine processes; their channels are still to be attached."""
    started: list[EngineProcess] = []

    def start(layout: Layout, *options: str) -> EngineProcess:
        started.append(EngineProcess(layout, *options))
        return started[-1]

    yield start
    for process in started:
        process.end()


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Wait until a condition holds."""

    def wait(condition: Callable[[], bool], timeout: float = 10.0) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail("the condition did not come true in time")
            time.sleep(0.002)

    return wait


@pytest.fixture
def open_files() -> Callable[[], dict[str, str]]:
    """This process's descriptors and what each refers to."""

    def listing() -> dict[str, str]:
        found: dict[str, str] = {}
        for entry in Path("/proc/self/fd").iterdir():
            try:
                found[entry.name] = str(entry.readlink())
            except FileNotFoundError:
                continue  # the descriptor of the listing itself
        return found

    return listing
