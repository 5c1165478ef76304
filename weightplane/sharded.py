"""Versions between sharded trainers and sharded engines, by a plan.

Every trainer rank has a `ShardedPublisher`, every rollout rank a `ShardedSubscriber`, all with the
same `Plan`. A rollout rank stages its own shards, from trainer ranks and from other rollout ranks,
beside the weights that serve, verifies every chunk, and shows the version as staged when it is
whole; its owner commits it at a token boundary, as with a `Subscriber`. An engine of several ranks
commits when all of them have staged the version, and commits the same number on all.

Nobody pushes, and there is no coordinator to lose: ranks look at the chunk headers of those they
receive from and of those they serve (see `weightplane.plan_transfer`). A trainer rank writes over a
version when those it serves have it, or have shown no sign for ``stall_seconds``; one that was too
slow aborts that version, keeps what serves, and goes on with the newer one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping

import numpy
import torch

from weightplane.digest import Manifest, tensor_digest
from weightplane.errors import (
    ClosedError,
    InvalidArgumentError,
    StalledError,
    WeightPlaneError,
)
from weightplane.holder import VersionHolder
from weightplane.layout import Layout, TensorSpec
from weightplane.local_layout import local_layout
from weightplane.memory import BufferPool, StagingBuffer
from weightplane.p2p import Offer, Transport
from weightplane.p2p.arena import Arena
from weightplane.p2p.readers import make_transport
from weightplane.plan import Plan
from weightplane.plan_transfer import PlanEndpoint
from weightplane.store import VersionStore
from weightplane.swap import Held
from weightplane.transfer import write_state
from weightplane.version import Transfer, VersionLedger, WeightVersion

logger = logging.getLogger("weightplane")

_LOOK_SECONDS = 0.002
"""How often to look for a newer version: one read of 64 bytes."""

_UNKNOWN = "not received"
"""The manifest of a version that never became whole here."""


class ShardedPublisher:
    """One trainer rank's side. Used by one thread.

    Memory: the rank's shards once, and once more the chunks that others read.

    Args:
        plan: the same on every rank; compare `Plan.digest`.
        rank: of the plan's source.
        tensors: what this rank has, named as the storages of the plan's source layout.
        transport: its name.
        stall_seconds: how long a rank that is served here may show no sign of a version before it
            is written over.
        make: how to make the transport; for settings.

    Raises:
        LayoutError: the tensors are not the rank's.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        tensors: Iterable[TensorSpec],
        transport: str = "shm",
        *,
        stall_seconds: float = 60.0,
        make: Callable[[str, int, int], Transport] = make_transport,
    ) -> None:
        _check_rank(rank, plan.source.size, "source")
        self._layout = local_layout(plan.source, rank, tensors)
        self._stall_seconds = stall_seconds
        self._arena = Arena(self._layout.size)
        flat = torch.frombuffer(self._arena.bytes, dtype=torch.uint8)
        self._views = self._layout.views(flat)
        self._ledger = VersionLedger()
        self._endpoint = PlanEndpoint(plan, rank, transport, stall_seconds=stall_seconds, make=make)

    def __enter__(self) -> ShardedPublisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def offer(self) -> Offer:
        """How others reach this rank."""
        return self._endpoint.offer

    def connect(self, offers: Mapping[int, Offer]) -> None:
        """Learn how to reach everybody, by the number of the endpoint: source ranks first, then
        destination ranks. Again when one was restarted.
        """
        self._endpoint.connect(offers)

    def publish(self, state: Mapping[str, torch.Tensor], number: int) -> WeightVersion:
        """Copy this rank's tensors and make them readable as version ``number``.

        Waits for the ranks that are served here to have the version before.

        Raises:
            LayoutError: the tensors are not the rank's; nothing was changed.
            VersionError: the number does not grow; nothing was changed.
        """
        self._layout.check(state)
        self._ledger.check_next(number)
        latest = self._ledger.latest
        if latest is not None:
            try:
                self.wait(latest)
            except StalledError as error:
                logger.warning("%s; it is written over", error)
        manifest, _ = write_state(self._layout, state, self._arena.bytes, self._views)
        version = WeightVersion(number, None, manifest.digest, time.time())
        self._endpoint.publish(numpy.frombuffer(self._arena.bytes, numpy.uint8), number)
        self._ledger.announce(version)
        return version

    def wait(self, number: int, timeout: float | None = None) -> None:
        """Wait until the ranks that are served here have version ``number``.

        Args:
            number: published.
            timeout: seconds; by default ``stall_seconds``.

        Raises:
            StalledError: some do not; names them.
        """
        seconds = self._stall_seconds if timeout is None else timeout
        deadline = time.monotonic() + seconds
        while behind := self._endpoint.behind(number):
            if time.monotonic() > deadline:
                names = ", ".join(map(repr, behind))
                raise StalledError(f"weight version {number} is not at {names} after {seconds:g} s")
            time.sleep(_LOOK_SECONDS)

    def close(self) -> None:
        """Release the memory; readers that are reading find nothing any more. Idempotent."""
        self._endpoint.close()


class ShardedSubscriber(VersionHolder):
    """One rollout rank's side: stages versions in a thread of its own; commit as a `Subscriber`.

    Memory: a buffer of the rank's shards for each of: the active version, ``retain`` previous ones,
    the one being staged; and once the chunks, which other ranks may read.

    Args:
        plan: the same on every rank; compare `Plan.digest`.
        rank: of the plan's destination.
        tensors: what this rank has, named as the storages of the plan's destination layout.
        transport: its name.
        retain: previous versions to keep in memory for `rollback`.
        stall_seconds: how long a source may take to show a chunk after another source showed the
            version: ranks of a trainer publish at different moments.
        buffer_wait_seconds: how long a version waits for the engine to let go of old tensors.
        make: how to make the transport; for settings.

    Raises:
        LayoutError: the tensors are not the rank's.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        tensors: Iterable[TensorSpec],
        transport: str = "shm",
        *,
        retain: int = 1,
        stall_seconds: float = 60.0,
        buffer_wait_seconds: float = 30.0,
        make: Callable[[str, int, int], Transport] = make_transport,
    ) -> None:
        _check_rank(rank, plan.destination.size, "destination")
        if retain < 0:
            raise InvalidArgumentError(f"retain is {retain}; use 0 or more")
        layout = local_layout(plan.destination, rank, tensors)
        super().__init__(layout, VersionStore(retain, stage_ahead=1))
        self._pool = BufferPool(layout.size, limit=2 + retain)
        self._stall_seconds = stall_seconds
        self._buffer_wait_seconds = buffer_wait_seconds
        self._seen = -1
        self._whole: int | None = None
        self._offers: list[Mapping[int, Offer]] = []
        self._endpoint = PlanEndpoint(
            plan, plan.source.size + rank, transport, stall_seconds=stall_seconds, make=make
        )
        self._offer = self._endpoint.offer
        self._stop = threading.Event()
        name = f"weightplane-{plan.destination.ranks[rank]}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def offer(self) -> Offer:
        """How others reach this rank."""
        return self._offer

    def connect(self, offers: Mapping[int, Offer]) -> None:
        """Learn how to reach everybody, by the number of the endpoint: source ranks first, then
        destination ranks. Again when one was restarted. Takes effect before the next version.
        """
        self._offers.append(dict(offers))

    def close(self, timeout: float = 5.0) -> None:
        """Stop the thread and let go of every version; tensors that are held stay valid.

        Raises:
            StalledError: the thread did not end within ``timeout`` seconds.
        """
        self._stop.set()
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise StalledError(f"thread {self._thread.name} did not end in {timeout:g} seconds")
        super().close(timeout)

    def _run(self) -> None:
        try:
            while not self._stop.wait(_LOOK_SECONDS):
                while self._offers:
                    self._endpoint.connect(self._offers.pop(0))
                    self._store.connected()
                # Nobody is told: this lets go of the versions that swaps have dropped.
                self._store.take_outbox()
                newest = self._endpoint.newest()
                if newest is not None and newest > self._seen:
                    self._seen = newest
                    self._stage(newest)
        except WeightPlaneError as error:
            self._store.lost(error)
        except Exception as error:
            # An exception in a thread reaches nobody otherwise; the owner meets this one in its
            # next wait.
            self._store.lost(WeightPlaneError(f"the staging thread died: {error!r}"))
        finally:
            self._endpoint.close()

    def _stage(self, number: int) -> None:
        """Make a version whole here, or abort it and say why."""
        buffer: StagingBuffer | None = None
        try:
            if self._whole is not None:
                self._wait_passed_on(self._whole)
            buffer = self._pool.obtain(
                number, self._make_room, self._stop, self._buffer_wait_seconds
            )
            received = self._endpoint.receive(
                numpy.frombuffer(buffer.bytes, numpy.uint8), number, self._check_open
            )
            tensors = self._layout.views(buffer.lease())
            begun = time.monotonic()
            manifest = _manifest(self._layout, tensors)
            seconds = time.monotonic() - begun
        except WeightPlaneError as error:
            if buffer is not None:
                buffer.give_back()
            self._endpoint.skip(number)
            lost = WeightVersion(number, None, _UNKNOWN, time.time())
            self._store.announce(lost, time.monotonic())
            self._store.abort(number, str(error))
            return
        self._whole = number
        version = WeightVersion(number, None, manifest.digest, time.time())
        self._store.announce(version, time.monotonic() - received.seconds - seconds)
        transfer = Transfer(received.byte_count, received.seconds, seconds)
        self._store.put(Held(version, manifest, buffer, tensors), transfer)

    def _check_open(self) -> None:
        if self._stop.is_set():
            raise ClosedError("the subscriber was closed")

    def _wait_passed_on(self, number: int) -> None:
        """Wait until those who are served here have the version that is here now."""
        deadline = time.monotonic() + self._stall_seconds
        while behind := self._endpoint.behind(number):
            self._check_open()
            if time.monotonic() > deadline:
                names = ", ".join(map(repr, behind))
                logger.warning("weight version %d is not at %s; it is written over", number, names)
                return
            time.sleep(_LOOK_SECONDS)

    def _make_room(self) -> None:
        self._store.make_room()
        self._store.take_outbox()


def _manifest(layout: Layout, tensors: Mapping[str, torch.Tensor]) -> Manifest:
    digests = (bytes.fromhex(tensor_digest(tensors[spec.name])) for spec in layout.tensors)
    return Manifest(layout, tuple(digests))


def _check_rank(rank: int, size: int, side: str) -> None:
    if not 0 <= rank < size:
        raise InvalidArgumentError(f"rank is {rank}; the plan's {side} has ranks 0 to {size - 1}")
