"""A rollout engine in miniature: a process that subscribes, and does what its stdin says."""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, ClassVar

from weightplane import Channel, Layout, Subscriber, WeightPlaneError, tensor_digest
from weightplane.p2p import Offer
from weightplane.p2p.shm import ShmReader


class SlowReader(ShmReader):
    """Reads shared memory with a pause before every run, so that a test can act in the middle."""

    def __init__(self, offer: Offer, seconds: float) -> None:
        super().__init__(offer)
        self._seconds = seconds

    def read(self, slot: int, offset: int, destination: memoryview) -> None:
        time.sleep(self._seconds)
        super().read(slot, offset, destination)


class CountingReader(ShmReader):
    """Notes how many turns a token loop made during each copy."""

    loops: ClassVar[list[TokenLoop]] = []

    def read(self, slot: int, offset: int, destination: memoryview) -> None:
        loop = self.loops[-1] if self.loops else None
        before = loop.turns if loop else 0
        super().read(slot, offset, destination)
        if loop:
            loop.turns_in_runs.append(loop.turns - before)


class TokenLoop:
    """A pure Python loop in another thread: what a staging thread that hogs the lock would stop."""

    def __init__(self) -> None:
        self.turns = 0
        self.turns_in_runs: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.turns += 1

    def stop(self) -> list[int]:
        self._stop.set()
        self._thread.join()
        return self.turns_in_runs


def commands(subscriber: Subscriber) -> dict[str, Callable[..., Any]]:
    loops = CountingReader.loops

    def digests() -> dict[str, str]:
        return {name: tensor_digest(tensor) for name, tensor in subscriber.tensors.items()}

    return {
        "wait_staged": lambda: subscriber.wait_staged(60).number,
        "commit": lambda number: subscriber.commit(number).pause_seconds,
        "rollback": lambda: subscriber.rollback().version.number,
        "active": lambda: subscriber.active and subscriber.active.number,
        "digests": digests,
        "records": lambda: [asdict(record) for record in subscriber.records()],
        "status": lambda: asdict(subscriber.status()),
        "events": lambda: [[event.kind, event.number] for event in subscriber.events()],
        "start_loop": lambda: loops.append(TokenLoop()),
        "stop_loop": lambda: loops.pop().stop(),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("descriptor", type=int)
    parser.add_argument("--read-delay", type=float, default=0.0)
    parser.add_argument("--name", default=None)
    parser.add_argument("--count-turns", action="store_true")
    arguments = parser.parse_args()
    layout = Layout.from_json(sys.stdin.buffer.readline())

    def slow(offer: Offer) -> SlowReader:
        return SlowReader(offer, arguments.read_delay)

    subscriber = Subscriber(
        Channel.inherited(arguments.descriptor),
        layout,
        name=arguments.name,
        readers={"shm": CountingReader if arguments.count_turns else slow},
        # A reader of the test's own is to be read from.
        share=not arguments.count_turns and not arguments.read_delay,
    )
    table = commands(subscriber)
    with subscriber:
        for line in sys.stdin:
            request = json.loads(line)
            command = table[request.pop("command")]
            try:
                answer = command(**request)
            except WeightPlaneError as error:
                answer = {"error": type(error).__name__, "message": str(error)}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
