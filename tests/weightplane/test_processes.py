"""Real processes: kills, stops, restarts, and the interpreter lock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from weightplane import (
    Channel,
    Layout,
    Manifest,
    Publisher,
    PublisherGoneError,
    StalledError,
    Subscriber,
    channel_pair,
    tensor_digest,
)
from weightplane.p2p.shm import ShmReader
from weightplane.transfer import RUN_BYTES


def digests(state):
    return {name: tensor_digest(tensor) for name, tensor in state.items()}


def test_an_engine_process_serves_what_the_learner_published(publisher, engine, state):
    process = engine(publisher.layout, "--name", "engine-a")
    publisher.attach(process.channel)
    for number in (0, 1, 2):
        publisher.publish(state(number), number)
        assert process.ask("wait_staged") == number
        assert process.ask("commit", number=number) < 0.05
        assert process.ask("digests") == digests(state(number))
    assert process.ask("rollback") == 1
    assert process.ask("digests") == digests(state(1))
    record = process.ask("records")[1]
    assert publisher.report(2).version.manifest == Manifest.of(state(2)).digest
    assert process.ask("status")["active"]["manifest"] == Manifest.of(state(1)).digest
    ours = publisher.report(1).deliveries[0].record
    assert record["staged_at"] == ours.staged_at
    assert record["announced_at"] == ours.announced_at


@pytest.fixture(scope="module")
def large():
    """Sixty-four megabytes in sixteen tensors, and their layout."""
    state = {
        f"layers.{index}": torch.full((1 << 21,), float(index)).bfloat16() for index in range(16)
    }
    return state, Layout.of(state)


def test_a_subscriber_killed_in_the_middle_of_staging_costs_nobody_else(large, engine, eventually):
    state, layout = large
    with Publisher(layout, stall_seconds=30) as publisher:
        victim = engine(layout, "--name", "victim", "--read-delay", "0.05")
        survivor = engine(layout, "--name", "survivor")
        for process in (victim, survivor):
            publisher.attach(process.channel)
        publisher.wait_subscribers(2, 60)
        publisher.publish(state, 1)
        assert survivor.ask("wait_staged") == 1
        victim.signal(signal.SIGKILL)
        began = time.monotonic()
        publication = publisher.wait(1, 10)
        assert time.monotonic() - began < 5
        assert [(item.subscriber, item.failed) for item in publication.deliveries] == [
            ("victim", True),
            ("survivor", False),
        ]
        survivor.ask("commit", number=1)
        # Every slot is free again: more versions than slots go through at once.
        for number in (2, 3, 4):
            publisher.publish(state, number)
            assert publisher.wait(number, 10).staged_everywhere
        assert survivor.ask("active") == 1
        # A restarted engine catches up with the newest version.
        restarted = engine(layout, "--name", "victim")
        publisher.attach(restarted.channel)
        assert restarted.ask("wait_staged") == 4
        restarted.ask("commit", number=4)
        assert restarted.ask("digests") == digests(state)


def test_a_publisher_killed_in_the_middle_of_staging_leaves_the_engine_serving(
    layout, join, state, same, tmp_path
):
    """The publisher runs in a process of its own and is killed while the engine reads."""
    torch.save(state(1), tmp_path / "state.pt")
    script = (
        "import sys, time, torch\n"
        "from weightplane import Channel, Layout, Publisher\n"
        "state = torch.load(sys.argv[2])\n"
        "publisher = Publisher(Layout.of(state))\n"
        "publisher.attach(Channel.inherited(int(sys.argv[1])))\n"
        "publisher.wait_subscribers(1, 60)\n"
        "publisher.publish(state, 1)\n"
        "publisher.wait(1)\n"
        "state['scale'] += 1\n"
        "publisher.publish(state, 2)\n"
        "time.sleep(60)\n"
    )
    ours, theirs = channel_pair()
    learner = subprocess.Popen(
        [sys.executable, "-c", script, str(theirs.fileno()), str(tmp_path / "state.pt")],
        pass_fds=[theirs.fileno()],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    theirs.close()
    reading, resume = threading.Event(), threading.Event()

    class PausedReader(ShmReader):
        def read(self, slot, offset, destination):
            if slot == 1:
                reading.set()
                resume.wait(30)
            super().read(slot, offset, destination)

    with Subscriber(Channel(ours), layout, readers={"shm": PausedReader}, share=False) as engine:
        engine.commit(engine.wait_staged(60).number)
        assert reading.wait(60)
        learner.kill()
        learner.wait()
        resume.set()
        # The memory outlives its owner, so the version arrives whole, and may be committed.
        assert engine.wait_staged(10).number == 2
        assert same(engine.tensors, state(1))
        engine.commit(2)
        assert engine.tensors["scale"] == state(1)["scale"] + 1
        with pytest.raises(PublisherGoneError, match="the peer closed the channel"):
            engine.wait_staged(10)
        assert same(engine.rollback().tensors, state(1))


def test_a_stopped_subscriber_trips_the_watchdog_and_resumes_unharmed(large, engine, eventually):
    state, layout = large
    with Publisher(layout, slots=2, stall_seconds=0.5) as publisher:
        process = engine(layout, "--name", "stopped")
        publisher.attach(process.channel)
        publisher.wait_subscribers(1, 60)
        process.signal(signal.SIGSTOP)
        for number in (1, 2):
            publisher.publish(state, number)
        with pytest.raises(StalledError, match=rf"'stopped' \(process {process.pid}\) holds"):
            publisher.publish(state, 3)
        process.signal(signal.SIGCONT)
        eventually(lambda: not publisher.report(2).pending, timeout=30)
        publisher.publish(state, 3)
        eventually(lambda: publisher.report(3).staged_everywhere, timeout=30)


def test_staging_does_not_stop_the_token_loop(large, engine):
    """The owner runs pure Python, the worst case for a thread that keeps the interpreter lock.

    Counted is the loop's own processor time while a version is staged, not the time that passes: a
    busy machine takes both threads off the processor, but only a staging thread that keeps the lock
    leaves the loop without a turn between the start and the end of its copies.
    """
    state, layout = large
    with Publisher(layout) as publisher:
        process = engine(layout, "--count-turns")
        publisher.attach(process.channel)
        publisher.wait_subscribers(1, 60)
        turns: list[int] = []
        for number in range(4):
            process.ask("start_loop")
            publisher.publish(state, number)
            assert publisher.wait(number, 60).staged_everywhere
            turns += process.ask("stop_loop")
            process.ask("commit", number=number)
        assert len(turns) == 4 * layout.size // RUN_BYTES
        # A copy that kept the lock would leave no turn in any of them.
        assert any(turns)
