"""Plans executed over transports: shards arrive exactly, also when senders die or damage chunks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy
import pytest
import xxhash

from tests.weightplane.planning import (
    assert_holds,
    empty_arenas,
    filled_arenas,
    random_sides,
    random_values,
)
from weightplane import StalledError, TransportUnavailableError
from weightplane.p2p import Offer
from weightplane.p2p.readers import make_transport
from weightplane.plan import PlanSettings, plan
from weightplane.plan_transfer import PlanEndpoint, SupersededError

ROOT = Path(__file__).parents[2]
SETTINGS = PlanSettings(chunk_bytes=64, allow_unused=True)


class Nodes:
    """All endpoints of a plan in one process, each destination in a thread of its own."""

    def __init__(self, seed, transport="shm", **options):
        self.source, self.destination = random_sides(seed)
        self.plan = plan(self.source, self.destination, SETTINGS)
        self.nodes = [
            PlanEndpoint(self.plan, endpoint, transport, **options)
            for endpoint in range(self.plan.endpoints)
        ]

    def offers(self):
        found = {}
        for endpoint, node in enumerate(self.nodes):
            offer = node.offer
            found[endpoint] = Offer(
                offer.transport, offer.slots, offer.slot_bytes, endpoint=offer.endpoint
            )
        return found

    def connect(self, without=()):
        for node in self.nodes:
            node.connect({key: o for key, o in self.offers().items() if key not in without})

    def publish(self, version, without=()):
        values = random_values(self.source, version)
        for endpoint, arena in enumerate(filled_arenas(self.source, values)):
            if endpoint not in without:
                self.nodes[endpoint].publish(arena, version)
        return values

    def receive(self, version, without=()):
        arenas = empty_arenas(self.destination)
        answers: dict[int, object] = {}

        def run(endpoint):
            try:
                arena = arenas[endpoint - self.source.size]
                answers[endpoint] = self.nodes[endpoint].receive(arena, version)
            except Exception as error:
                answers[endpoint] = error

        threads = [
            threading.Thread(target=run, args=(endpoint,))
            for endpoint in range(self.source.size, self.plan.endpoints)
            if endpoint not in without
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return arenas, answers

    def close(self):
        for node in self.nodes:
            node.close()


@pytest.fixture
def nodes():
    made = []

    def make(*arguments, **options):
        made.append(Nodes(*arguments, **options))
        return made[-1]

    yield make
    for item in made:
        item.close()


@pytest.mark.parametrize("seed", range(12))
def test_every_slice_arrives_exactly_and_every_byte_once(nodes, seed):
    cluster = nodes(seed)
    cluster.connect()
    for version in range(3):
        values = cluster.publish(version)
        arenas, answers = cluster.receive(version)
        assert_holds(cluster.destination, arenas, values)
        received = sum(answer.byte_count for answer in answers.values())
        assert received == cluster.plan.wire_bytes == cluster.plan.minimum_bytes
        assert all(answer.from_others == 0 for answer in answers.values())


def seed_of_size(endpoints):
    """A seed whose plan has so many endpoints."""
    for seed in range(1000):
        source, destination = random_sides(seed)
        if source.size + destination.size == endpoints:
            return seed
    pytest.fail(f"no random plan has {endpoints} endpoints")


def seed_with_relays():
    """A small plan with a relay that no other receiver depends on being whole itself."""
    for seed in range(1000):
        source, destination = random_sides(seed)
        made = plan(source, destination, SETTINGS)
        relays = set(made.hop_sender[made.hop_depends_on >= 0].tolist())
        if relays and source.size > 1 and made.endpoints <= 5:
            return seed, min(relays)
    pytest.fail("no random plan has a relay")


def test_a_dead_relay_is_replaced_by_whoever_holds_the_chunk(nodes):
    seed, relay = seed_with_relays()
    cluster = nodes(seed, stall_seconds=0.3)
    cluster.connect()
    values = cluster.publish(1)
    arenas, answers = cluster.receive(1, without={relay})
    others = [
        rank for rank in range(cluster.destination.size) if rank + cluster.source.size != relay
    ]
    assert not [answer for answer in answers.values() if isinstance(answer, Exception)]
    assert sum(answer.from_others for answer in answers.values()) > 0
    # The relay restarts and catches up from its peers and the source.
    whole, again = cluster.receive(1)
    assert_holds(cluster.destination, whole, values)
    assert all(not isinstance(answer, Exception) for answer in again.values())
    for rank in others:
        assert numpy.array_equal(arenas[rank], whole[rank])


def test_a_source_that_is_silent_is_named_when_nobody_else_holds_a_chunk(nodes):
    cluster = nodes(3, stall_seconds=0.1)
    cluster.connect()
    cluster.publish(1)
    _, answers = cluster.receive(2)
    assert any(
        isinstance(answer, StalledError) and "can be had from nobody" in str(answer)
        for answer in answers.values()
    )


def test_a_damaged_chunk_is_read_again(nodes):
    cluster = nodes(5)
    cluster.connect()
    values = cluster.publish(1)
    for node in cluster.nodes[cluster.source.size :]:
        for peer in range(cluster.plan.endpoints):
            reader = node._reader(peer)
            damaged = []

            def read(slot, offset, destination, reader=reader, damaged=damaged, own=reader.read):
                own(slot, offset, destination)
                if offset and not damaged and len(destination) != 64:
                    damaged.append(offset)
                    destination[0] ^= 1

            reader.read = read
    arenas, answers = cluster.receive(1)
    assert_holds(cluster.destination, arenas, values)
    assert sum(answer.read_again for answer in answers.values()) > 0


def test_a_version_that_was_written_over_is_not_taken_for_the_one_that_is_wanted(nodes):
    cluster = nodes(5, stall_seconds=0.1)
    cluster.connect()
    cluster.publish(2)
    _, answers = cluster.receive(1)
    reasons = [str(answer) for answer in answers.values() if isinstance(answer, SupersededError)]
    assert reasons and set(reasons) == {"weight version 2 has taken the place of 1"}


@pytest.mark.parametrize("transport", ["torchdist", "nixl", "mooncake"])
def test_plans_run_over_other_transports(nodes, transport):
    try:
        make_transport(transport, 64, 1).close()
    except TransportUnavailableError as error:
        pytest.skip(str(error))
    cluster = nodes(seed_of_size(3), transport)
    cluster.connect()
    values = cluster.publish(0)
    arenas, answers = cluster.receive(0)
    assert not [answer for answer in answers.values() if isinstance(answer, Exception)]
    assert_holds(cluster.destination, arenas, values)


class Process:
    """`plan_process` for one endpoint."""

    def __init__(self, seed, endpoint, transport):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.weightplane.plan_process",
             str(seed), str(endpoint), transport],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def answer(self):
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("["):
                return json.loads(line)
        pytest.fail(f"an endpoint ended with {self._process.wait(5)}")

    def tell(self, **request):
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def kill(self):
        self._process.kill()
        self._process.communicate()


def test_sharded_processes_exchange_a_plan_and_survive_the_death_of_a_relay():
    seed, relay = seed_with_relays()
    source, destination = random_sides(seed)
    made = plan(source, destination, SETTINGS)
    processes = [Process(seed, endpoint, "shm") for endpoint in range(made.endpoints)]
    try:
        facts = [process.answer() for process in processes]
        assert {fact[3] for fact in facts} == {made.digest}
        offers = {endpoint: fact[:3] for endpoint, fact in enumerate(facts)}
        for process in processes:
            process.tell(offers=offers)
            process.answer()
        receivers = range(source.size, made.endpoints)
        for version in (1, 2):
            if version == 2:
                processes[relay].kill()
            alive = [item for item in receivers if version == 1 or item != relay]
            for endpoint in range(source.size):
                processes[endpoint].tell(version=version)
                processes[endpoint].answer()
            for endpoint in alive:
                processes[endpoint].tell(version=version)
            values = random_values(source, version)
            arenas = empty_arenas(destination)
            for arena in arenas:
                arena[:] = 0
            for endpoint in alive:
                digest, _, from_others = processes[endpoint].answer()
                rank = endpoint - source.size
                expected = expected_arena(made, source, destination, values, rank)
                assert digest == xxhash.xxh3_128_hexdigest(expected.data)
                assert version == 2 or from_others == 0
    finally:
        for process in processes:
            process.kill()


def expected_arena(made, source, destination, values, rank):
    """What the reference executor leaves in a destination's arena."""
    from weightplane.execute import execute

    arenas = empty_arenas(destination)
    execute(made, filled_arenas(source, values), arenas)
    return arenas[rank]
