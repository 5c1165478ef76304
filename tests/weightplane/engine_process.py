"""A rollout engine in miniature: a process that subscribes, and does what its stdin says."""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

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


class TokenLoop:
    """A pure Python loop in another thread: what a staging thread that hogs the lock would stop."""

    def __init__(self) -> None:
        self.gaps: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        last = time.perf_counter()
        while not self._stop.is_set():
            now = time.perf_counter()
            if now - last > 0.0005:
                self.gaps.append(now - last)
            last = now

    def stop(self) -> list[float]:
        self._stop.set()
        self._thread.join()
        return sorted(self.gaps)


def commands(subscriber: Subscriber) -> dict[str, Callable[..., Any]]:
    loops: list[TokenLoop] = []

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
    arguments = parser.parse_args()
    layout = Layout.from_json(sys.stdin.buffer.readline())
    subscriber = Subscriber(
        Channel.inherited(arguments.descriptor),
        layout,
        name=arguments.name,
        readers={"shm": lambda offer: SlowReader(offer, arguments.read_delay)},
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
