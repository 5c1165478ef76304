"""One contract, every transport: shm, torchdist, nixl, mooncake, cuda_ipc."""

from __future__ import annotations

import json
import os
import random
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
    InvalidArgumentError,
    Layout,
    Publisher,
    Subscriber,
    TransportUnavailableError,
    WeightPlaneError,
    channel_pair,
)
from weightplane.p2p import Offer
from weightplane.p2p.arena import Arena
from weightplane.p2p.readers import TRANSPORTS, make_transport

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def noise(count, seed=0):
    return random.Random(seed).randbytes(count)


def start(script, *arguments):
    return subprocess.Popen(
        [sys.executable, str(HERE / script), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=20)


def answer(process, prefix):
    """The next line that starts with ``prefix``: a native library may print lines of its own."""
    for line in process.stdout:
        if line.startswith(prefix):
            return line
    pytest.fail(f"the process ended with {process.wait(5)}")


def test_any_range_of_any_slot_arrives_bit_for_bit(pair):
    size = pair.transport.offer.slot_bytes
    contents = [noise(size, seed) for seed in range(2)]
    for slot, data in enumerate(contents):
        pair.fill(slot, data)
    reader, arena = pair.reader()
    ranges = [(0, size), (0, 1), (size - 1, size), (1, 4098), (4095, 1 << 20), (77, 77 + 65536)]
    for slot in (1, 0):
        for begin, end in ranges:
            reader.read(slot, begin, arena[13 : 13 + end - begin] if end - begin < size else arena)
            shift = 13 if end - begin < size else 0
            assert arena[shift : shift + end - begin] == contents[slot][begin:end]


def test_bytes_beside_the_destination_are_left_alone(pair):
    pair.fill(0, noise(1000))
    reader, arena = pair.reader()
    arena[:] = b"\xaa" * len(arena)
    reader.read(0, 0, arena[100:200])
    assert arena[:100] == b"\xaa" * 100
    assert arena[200:300] == b"\xaa" * 100


def test_an_empty_read_reads_nothing(pair):
    reader, arena = pair.reader()
    reader.read(0, 0, arena[:0])
    reader.read(1, pair.transport.offer.slot_bytes, arena[:0])


def test_a_slot_that_is_written_again_is_read_anew(pair):
    reader, arena = pair.reader()
    for seed in range(5):
        pair.fill(seed % 2, noise(70001, seed))
        reader.read(seed % 2, 0, arena[:70001])
        assert arena[:70001] == noise(70001, seed)


@pytest.mark.parametrize(("slot", "offset", "length"), [(2, 0, 1), (-1, 0, 1), (0, -1, 1)])
def test_what_the_offer_does_not_have_is_refused(pair, slot, offset, length):
    reader, arena = pair.reader()
    with pytest.raises(InvalidArgumentError, match="are asked for"):
        reader.read(slot, offset, arena[:length])


def test_a_range_past_the_end_of_a_slot_is_refused(pair):
    reader, arena = pair.reader()
    with pytest.raises(InvalidArgumentError, match="are asked for"):
        reader.read(0, pair.transport.offer.slot_bytes - 1, arena[:2])


def test_memory_that_must_be_registered_is_refused_when_it_is_not(pair):
    if pair.name in ("shm", "cuda_ipc"):
        pytest.skip("this transport copies to any memory")
    reader, _ = pair.reader()
    with pytest.raises(InvalidArgumentError, match="not registered"):
        reader.read(0, 0, Arena(4096).bytes)


def test_several_readers_read_different_slots_at_once(pair):
    contents = [noise(1 << 20, seed) for seed in range(2)]
    for slot, data in enumerate(contents):
        pair.fill(slot, data)
    wrong = []

    def read(index):
        reader, arena = pair.reader()
        for turn in range(4):
            slot = (index + turn) % 2
            reader.read(slot, 0, arena[: 1 << 20])
            if arena[: 1 << 20] != contents[slot]:
                wrong.append((index, turn))

    threads = [threading.Thread(target=read, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


def test_another_process_reads_the_slots_and_its_death_costs_the_others_nothing(pair):
    data = noise(200_000)
    pair.fill(1, data)
    offer = pair.transport.offer
    process = start("reader_process.py")
    assert process.stdin is not None
    process.stdin.write(
        f"{offer.transport} {offer.slots} {offer.slot_bytes} {offer.endpoint.hex()}\n[1,5,100001]\n"
    )
    process.stdin.flush()
    assert json.loads(answer(process, "{"))["bytes"] == data[5:100006].hex()
    kill(process)
    reader, arena = pair.reader()
    reader.read(1, 0, arena[:100_000])
    assert arena[:100_000] == data[:100_000]


def test_reading_from_an_owner_that_was_killed_ends_and_never_hangs(pair):
    process = start("owner_process.py", pair.name, "65536")
    slots, slot_bytes, endpoint = json.loads(answer(process, "["))
    reader, arena = pair.open(Offer(pair.name, slots, slot_bytes, endpoint=bytes.fromhex(endpoint)))
    reader.read(1, 0, arena)
    assert arena == b"\x02" * slot_bytes
    kill(process)
    arena[:] = bytes(slot_bytes)
    try:
        reader.read(0, 0, arena)
    except WeightPlaneError:
        assert pair.name != "shm", "shared memory outlives its owner"
    else:
        assert arena == b"\x01" * slot_bytes


def test_a_malformed_endpoint_is_refused(pair):
    with pytest.raises(WeightPlaneError, match="malformed"):
        pair.open(Offer(pair.name, 2, 4096, endpoint=b"\xc1not msgpack"))


def test_closing_twice_is_harmless_and_leaves_no_thread_or_segment(make_pair, eventually):
    make_pair().close()
    threads, segments = threading.active_count(), set(Path("/dev/shm").iterdir())
    for _ in range(2):
        pair = make_pair(slot_bytes=65536)
        pair.fill(0, noise(100))
        reader, arena = pair.reader()
        reader.read(0, 0, arena[:100])
        reader.close()
        pair.close()
        pair.transport.close()
    eventually(lambda: threading.active_count() <= threads)
    assert set(Path("/dev/shm").iterdir()) <= segments


def test_other_python_threads_run_while_bytes_move(pair):
    reader, arena = pair.reader()
    turns, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            turns[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    deadline = time.monotonic() + 20
    before = turns[0]
    while turns[0] < before + 1000 and time.monotonic() < deadline:
        reader.read(0, 0, arena)
    stop.set()
    thread.join()
    assert turns[0] >= before + 1000


def test_versions_are_committed_over_it_exactly_as_published(pair, state, same):
    layout = Layout.of(state(0, rows=2000))
    options = {} if pair.name == "cuda_ipc" else {"slot_bytes": layout.size}
    transport = type(pair)(pair.name, **options).transport
    with Publisher(layout, transport=transport) as publisher:
        engines = []
        for index in range(2):
            ours, theirs = channel_pair()
            publisher.attach(Channel(ours))
            engines.append(Subscriber(Channel(theirs), layout, name=f"engine-{index}"))
        publisher.wait_subscribers(2, 60)
        for number in range(4):
            weights = state(number, rows=2000)
            weights["layers.0.router"][0, :4] = torch.tensor(
                [float("nan"), float("inf"), -float("inf"), -0.0]
            )
            publisher.publish(weights, number)
            publication = publisher.wait(number, 60)
            assert publication.staged_everywhere, publication.failed
            for engine in engines:
                tensors = engine.commit(number).tensors
                assert all(
                    torch.equal(
                        tensors[name].contiguous().view(-1).view(torch.uint8),
                        weights[name].contiguous().view(-1).view(torch.uint8),
                    )
                    for name in weights
                )
        for engine in engines:
            engine.close()


def test_a_process_that_used_it_ends_with_status_0(pair):
    """Native libraries have crashed in their destructors."""
    alone = start("all_transports_process.py", pair.name)
    alone.communicate(timeout=60)
    assert alone.returncode == 0


def test_a_process_that_used_every_transport_ends_with_status_0():
    names = []
    for name in TRANSPORTS:
        try:
            make_transport(name, 4096, 2).close()
        except TransportUnavailableError:
            continue
        names.append(name)
    together = start("all_transports_process.py", *names)
    together.communicate(timeout=60)
    assert together.returncode == 0
