"""The life of a version between sharded sides: staged by a plan, committed, rolled back."""

from __future__ import annotations

import pytest
import torch

from tests.weightplane.planning import (
    assert_holds,
    empty_arenas,
    filled_arenas,
    random_sides,
    random_values,
)
from weightplane import (
    ClusterLayout,
    CommitRefusedError,
    InvalidArgumentError,
    LayoutError,
    RankLayout,
    ShardedPublisher,
    ShardedSubscriber,
    Slice,
    StalledError,
    Storage,
    TensorSpec,
    VersionError,
    VersionState,
)
from weightplane.plan import PlanSettings, plan

SETTINGS = PlanSettings(chunk_bytes=64, allow_unused=True)


def has_work_for_all(seed):
    source, destination = random_sides(seed)
    made = plan(source, destination, SETTINGS)
    return all(
        cluster.storages(rank) for cluster in (source, destination) for rank in range(cluster.size)
    ) and all(made.part(source.size + rank).receives for rank in range(destination.size))


SEEDS = [seed for seed in range(60) if has_work_for_all(seed)][:16]


def specs_of(cluster, rank):
    """A rank's storages as tensors of bytes."""
    return [
        TensorSpec(storage.name, (storage.byte_count,), "uint8")
        for storage in cluster.storages(rank)
    ]


def state_of(cluster, rank, arena):
    flat = torch.from_numpy(arena)
    return {
        storage.name: flat[storage.offset : storage.offset + storage.byte_count]
        for storage in cluster.storages(rank)
    }


class Cluster:
    """All ranks of both sides in this process."""

    def __init__(self, seed, engine=(), **options):
        self.source, self.destination = random_sides(seed)
        self.plan = plan(self.source, self.destination, SETTINGS)
        self._options = {"stall_seconds": 5.0, **options}
        self._engine = dict(engine)
        self.publishers = [self.publisher(rank) for rank in range(self.source.size)]
        self.subscribers = [self.subscriber(rank) for rank in range(self.destination.size)]
        self.connect()

    def publisher(self, rank):
        return ShardedPublisher(self.plan, rank, specs_of(self.source, rank), **self._options)

    def subscriber(self, rank):
        specs = specs_of(self.destination, rank)
        return ShardedSubscriber(self.plan, rank, specs, **self._options, **self._engine)

    def connect(self):
        everybody = [*self.publishers, *self.subscribers]
        offers = {number: end.offer for number, end in enumerate(everybody)}
        for end in everybody:
            end.connect(offers)

    def publish(self, number, without=()):
        arenas = filled_arenas(self.source, random_values(self.source, number))
        for rank, publisher in enumerate(self.publishers):
            if rank not in without:
                publisher.publish(state_of(self.source, rank, arenas[rank]), number)

    def stage(self, number):
        for subscriber in self.subscribers:
            while subscriber.wait_staged(10).number != number:
                pass

    def commit(self, number):
        for subscriber in self.subscribers:
            subscriber.commit(number)

    def assert_serves(self, number):
        arenas = empty_arenas(self.destination)
        for rank, subscriber in enumerate(self.subscribers):
            assert subscriber.active is not None and subscriber.active.number == number
            for storage in self.destination.storages(rank):
                place = slice(storage.offset, storage.offset + storage.byte_count)
                arenas[rank][place] = subscriber.tensors[storage.name].numpy()
        assert_holds(self.destination, arenas, random_values(self.source, number))

    def close(self):
        for end in [*self.subscribers, *self.publishers]:
            end.close()


@pytest.fixture
def cluster():
    made = []

    def make(seed, **options):
        made.append(Cluster(seed, **options))
        return made[-1]

    yield make
    for item in made:
        item.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_versions_are_staged_committed_and_rolled_back_exactly(cluster, seed):
    both = cluster(seed)
    for number in (1, 2, 3, 7):
        both.publish(number)
        both.stage(number)
        both.commit(number)
        both.assert_serves(number)
        for subscriber in both.subscribers:
            subscriber.verify()
    for subscriber in both.subscribers:
        subscriber.rollback()
    both.assert_serves(3)


def test_nothing_is_visible_before_it_is_whole(cluster):
    both = cluster(SEEDS[3], stall_seconds=20.0)
    both.publish(1)
    both.stage(1)
    both.commit(1)
    late = both.source.size - 1
    both.publish(2, without=(late,))
    with pytest.raises(StalledError):
        for subscriber in both.subscribers:
            subscriber.wait_staged(0.3)
    both.assert_serves(1)
    arena = filled_arenas(both.source, random_values(both.source, 2))[late]
    both.publishers[late].publish(state_of(both.source, late, arena), 2)
    both.stage(2)
    both.commit(2)
    both.assert_serves(2)


def test_tensors_that_the_engine_holds_keep_their_bytes(cluster):
    both = cluster(SEEDS[1])
    held = []
    for number in range(1, 7):
        both.publish(number)
        both.stage(number)
        both.commit(number)
        tensors = dict(both.subscribers[0].tensors)
        held = [*held, (tensors, {name: item.clone() for name, item in tensors.items()})][-1:]
        for now, then in held:
            assert all(torch.equal(now[name], then[name]) for name in now)


def test_a_cache_that_cannot_be_invalidated_refuses_the_swap(cluster):
    both = cluster(SEEDS[2])
    both.publish(1)
    both.stage(1)
    both.commit(1)

    def refuse(new, old):
        raise RuntimeError("in use")

    both.subscribers[0].register_cache("prefix cache", refuse)
    both.publish(2)
    both.stage(2)
    with pytest.raises(CommitRefusedError, match="prefix cache"):
        both.subscribers[0].commit(2)
    assert both.subscribers[0].active.number == 1


def test_a_rank_that_was_too_slow_aborts_and_takes_the_newer_version(cluster):
    """Its engine holds every buffer; the trainer does not wait for it for ever."""
    both = cluster(SEEDS[4], stall_seconds=0.3, engine={"buffer_wait_seconds": 0.2, "retain": 0})
    slow = both.subscribers[0]
    held = []
    for number in (1, 2):
        both.publish(number)
        both.stage(number)
        both.commit(number)
        held.append(dict(slow.tensors))
    both.publish(3)
    for other in both.subscribers[1:]:
        assert other.wait_staged(10).number == 3
    with pytest.raises(StalledError, match="no staging buffer became free"):
        slow.wait_staged(2)
    assert [r.state for r in slow.records() if r.version.number == 3] == [VersionState.ABORTED]
    assert slow.active.number == 2
    held.clear()
    both.publish(4)
    both.stage(4)
    both.commit(4)
    both.assert_serves(4)


def test_a_restarted_rank_catches_up_and_a_restarted_trainer_goes_on(cluster):
    both = cluster(SEEDS[5])
    both.publish(1)
    both.stage(1)
    both.commit(1)
    both.subscribers[0].close()
    both.subscribers[0] = both.subscriber(0)
    both.connect()
    assert both.subscribers[0].wait_staged(10).number == 1
    both.subscribers[0].commit(1)
    both.assert_serves(1)
    both.publishers[0].close()
    both.publishers[0] = both.publisher(0)
    both.connect()
    both.publish(2)
    both.stage(2)
    both.commit(2)
    both.assert_serves(2)


def test_closing_ends_a_wait_for_a_trainer_that_never_comes(cluster):
    both = cluster(SEEDS[6], stall_seconds=60.0)
    both.publish(1, without=(0,))
    both.close()


def test_bad_input_is_refused_before_anything_changes(cluster):
    both = cluster(SEEDS[7])
    first = both.publishers[0]
    arenas = filled_arenas(both.source, random_values(both.source, 1))
    state = state_of(both.source, 0, arenas[0])
    first.publish(state, 4)
    with pytest.raises(VersionError, match="after version 4"):
        first.publish(state, 4)
    with pytest.raises(LayoutError):
        first.publish({**state, "another": torch.zeros(1)}, 5)
    with pytest.raises(InvalidArgumentError, match="ranks 0 to"):
        ShardedPublisher(both.plan, 99, specs_of(both.source, 0))
    with pytest.raises(InvalidArgumentError, match="retain is -1"):
        ShardedSubscriber(both.plan, 0, specs_of(both.destination, 0), retain=-1)
    wrong = [TensorSpec(spec.name, (1,), "uint8") for spec in specs_of(both.destination, 0)]
    with pytest.raises(LayoutError, match=r"has 1 bytes, the layout"):
        ShardedSubscriber(both.plan, 0, wrong)
    with pytest.raises(LayoutError, match="the tensors given lack"):
        ShardedSubscriber(both.plan, 0, wrong[1:])


def test_column_and_row_shards_of_two_become_fused_shards_of_three():
    """bf16 parameters with the shapes that an engine has, from two trainer ranks to three."""
    weight = torch.randn(12, 6).bfloat16()
    spec = TensorSpec("w", (12, 6), "bfloat16")
    halves = [
        RankLayout(
            f"trainer/{rank}",
            (Storage("w", 0, 72),),
            (Slice("w", (6 * rank, 0), (6, 6), "w"),),
        )
        for rank in range(2)
    ]
    thirds = [
        RankLayout(
            f"engine/{rank}",
            (Storage("w", 0, 48),),
            (Slice("w", (0, 2 * rank), (12, 2), "w"),),
        )
        for rank in range(3)
    ]
    made = plan(ClusterLayout.build([spec], halves), ClusterLayout.build([spec], thirds))
    publishers = [
        ShardedPublisher(made, rank, [TensorSpec("w", (6, 6), "bfloat16")]) for rank in range(2)
    ]
    subscribers = [
        ShardedSubscriber(made, rank, [TensorSpec("w", (12, 2), "bfloat16")]) for rank in range(3)
    ]
    offers = {number: end.offer for number, end in enumerate([*publishers, *subscribers])}
    for end in [*publishers, *subscribers]:
        end.connect(offers)
    for rank, publisher in enumerate(publishers):
        publisher.publish({"w": weight[6 * rank : 6 * rank + 6]}, 1)
    for rank, subscriber in enumerate(subscribers):
        subscriber.commit(subscriber.wait_staged(10).number)
        assert torch.equal(subscriber.tensors["w"], weight[:, 2 * rank : 2 * rank + 2])
    for publisher in publishers:
        publisher.wait(1, 10)
    for end in [*subscribers, *publishers]:
        end.close()
