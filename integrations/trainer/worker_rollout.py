"""The rollout worker: one engine, one subscriber, and the loop between two token boundaries."""

from __future__ import annotations

import select
import socket
import time
from dataclasses import dataclass, field

import torch

from integrations.errors import RunError
from integrations.trainer.engine import RolloutEngine
from integrations.trainer.messages import (
    CommitVersion,
    EngineActivity,
    Generate,
    Generated,
    StartRollout,
    Stop,
    ToWorker,
    VersionCommitted,
    VersionRefused,
    VersionStaged,
)
from integrations.trainer.recipe import Recipe
from integrations.trainer.worker import ControlLink
from integrations.trainer.worker_model import WorkerModel, first_message, recipe_from_wire
from weightplane.channel import Channel
from weightplane.store import EventKind, SubscriberEvent
from weightplane.subscriber import Subscriber
from weightplane.version import VersionRecord

ACTIVITY_SECONDS = 0.5
IDLE_SECONDS = 0.5


@dataclass(slots=True)
class _Activity:
    """What the engine did since the last report."""

    started_at: float = field(default_factory=time.monotonic)
    busy_seconds: float = 0.0
    tokens: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0


class RolloutWorker:
    """Generates what the controller asks for, under the version the controller committed."""

    def __init__(
        self, link: ControlLink, recipe: Recipe, replica: int, weight_socket: socket.socket
    ) -> None:
        self._link = link
        self._recipe = recipe
        self._model = WorkerModel.of(recipe)
        self._engine: RolloutEngine | None = None
        self._to_commit: int | None = None
        self._activity = _Activity()
        self._subscriber = Subscriber(
            Channel(weight_socket), self._model.layout, name=f"rollout-{replica}"
        )
        self._sources = select.poll()
        self._sources.register(link.fileno(), select.POLLIN)
        self._sources.register(self._subscriber.fileno(), select.POLLIN)
        link.send(self._model.hello("rollout"))

    def run(self) -> None:
        """Serve until told to stop."""
        while True:
            engine = self._engine
            if engine is None or not engine.has_work:
                self._sources.poll(IDLE_SECONDS * 1000)
            for message in self._link.drain():
                if isinstance(message, Stop):
                    self._subscriber.close()
                    return
                self._handle(message)
            for event in self._subscriber.events():
                self._report(event)
            self._commit()
            if self._engine is not None and self._engine.has_work:
                self._step(self._engine)
            self._report_activity()

    def _handle(self, message: ToWorker) -> None:
        match message:
            case Generate():
                if self._engine is None:
                    raise RunError("requests arrived before any weight version was committed")
                for request in message.requests:
                    self._engine.submit(request)
            case CommitVersion():
                self._to_commit = message.version
            case _:
                raise RunError(f"a rollout worker does not know {type(message).__name__}")

    def _report(self, event: SubscriberEvent) -> None:
        """Tell the controller what became of an announced version."""
        if event.kind is EventKind.LOST:
            raise RunError(f"the learner's weights cannot be received any more: {event.reason}")
        if event.number is None:
            return
        if event.kind is EventKind.ABORTED:
            self._link.send(VersionRefused(event.number, event.reason))
        elif event.kind is EventKind.STAGED:
            record = self._record(event.number)
            transfer = record.transfer
            self._link.send(
                VersionStaged(
                    version=event.number,
                    announced_at=record.announced_at,
                    staged_at=event.at,
                    bytes=0 if transfer is None else transfer.byte_count,
                )
            )

    def _record(self, number: int) -> VersionRecord:
        for record in self._subscriber.records():
            if record.version.number == number:
                return record
        raise RunError(f"weight version {number} is staged but not on record")

    def _commit(self) -> None:
        """Swap at this token boundary, once no request needs weights older than the active ones.

        Under `finish_on_old` the version before the active one is still read by the requests that
        began on it; a second swap waits for them, so that at most two versions are ever in use.
        """
        version, engine = self._to_commit, self._engine
        if version is None:
            return
        if engine is not None and any(v != engine.version for v in engine.versions_in_use):
            return
        started = time.monotonic()
        weights = self._model.from_wire(self._subscriber.commit(version).tensors)
        if engine is None:
            rollout = self._recipe.rollout
            self._engine = RolloutEngine(
                self._model.config,
                self._model.contract,
                weights,
                version,
                blocks=rollout.blocks,
                block_size=rollout.block_size,
                max_running=rollout.max_running,
                prefill_chunk=rollout.prefill_chunk,
            )
        else:
            engine.swap(weights, version, self._recipe.rollout.swap_policy)
        committed = time.monotonic()
        self._to_commit = None
        self._link.send(
            VersionCommitted(
                version=version, committed_at=committed, pause_seconds=committed - started
            )
        )

    def _step(self, engine: RolloutEngine) -> None:
        outputs = engine.step()
        metrics, activity = engine.metrics, self._activity
        activity.busy_seconds += metrics.seconds
        activity.tokens += metrics.generated_tokens
        activity.prefill_tokens += metrics.prefill_tokens
        activity.cached_tokens += metrics.cache_hit_tokens
        for output in outputs:
            if output.trajectory is not None:
                self._link.send(Generated(output.trajectory.to_bytes()))

    def _report_activity(self) -> None:
        now = time.monotonic()
        activity, engine = self._activity, self._engine
        if engine is None or now - activity.started_at < ACTIVITY_SECONDS:
            return
        self._link.send(
            EngineActivity(
                started_at=activity.started_at,
                ended_at=now,
                busy_seconds=activity.busy_seconds,
                tokens=activity.tokens,
                prefill_tokens=activity.prefill_tokens,
                cached_tokens=activity.cached_tokens,
                running=engine.metrics.running,
                waiting=engine.metrics.waiting,
                version=engine.version,
            )
        )
        self._activity = _Activity(started_at=now)


def run_rollout(link: ControlLink, weight_sockets: list[socket.socket]) -> None:
    """Body of a rollout process."""
    start = first_message(link, StartRollout)
    recipe = recipe_from_wire(start.recipe)
    torch.set_num_threads(recipe.rollout.threads)
    RolloutWorker(link, recipe, start.replica, weight_sockets[0]).run()
