"""The controller: one event loop that keeps rollout engines and the learner busy, and in order.

It owns every decision and none of the work. Prompts are admitted by the staleness rule, finished
trajectories are scored and logged durably before anything else happens to them, batches go to the
learner in prompt order, and a new weight version is committed once every replica has it staged.
"""

from __future__ import annotations

import contextlib
import queue
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from integrations.errors import RunError, WorkerLostError
from integrations.trainer import messages
from integrations.trainer.buffer import Group, TrajectoryBuffer
from integrations.trainer.dispatcher import Dispatcher
from integrations.trainer.evaluation import EvaluationSchedule
from integrations.trainer.journal import (
    CheckpointSaved,
    Evaluated,
    Journal,
    RecoveredState,
    StepDone,
    StepPlanned,
    TrajectoryDone,
)
from integrations.trainer.launcher import Worker, WorkerLost, WorkerPool
from integrations.trainer.recipe import Recipe
from integrations.trainer.summary import RunSummary, batch_facts
from integrations.trainer.swaps import SwapCoordinator
from integrations.trainer.tasks import TaskStream
from integrations.trainer.tokenizer import Tokenizer
from integrations.trainer.trajectory import Trajectory
from integrations.trainer.worker_model import recipe_to_wire

POLL_SECONDS = 0.5
SAMPLES_SHOWN_PER_STEP = 2

Emit = Callable[..., dict[str, Any]]


class Controller:
    """Runs one training run from its first (or recovered) weight version to its last.

    Args:
        recipe: the validated recipe.
        run_dir: folder of the run.
        tasks, tokenizer: where prompts come from and how they become tokens.
        journal, recovered: the durable log, and what it says about an earlier process.
        contract_digest: every worker and every trajectory must carry it.
        emit: `emit(event, **fields)` publishes one event and returns it.
        to_run_time: converts `time.monotonic()` seconds into seconds since the run began.
    """

    def __init__(
        self,
        *,
        recipe: Recipe,
        run_dir: Path,
        tasks: TaskStream,
        tokenizer: Tokenizer,
        journal: Journal,
        recovered: RecoveredState,
        contract_digest: str,
        emit: Emit,
        to_run_time: Callable[[float], float],
    ) -> None:
        self._recipe = recipe
        self._run_dir = run_dir
        self._tasks = tasks
        self._tokenizer = tokenizer
        self._journal = journal
        self._recovered = recovered
        self._contract_digest = contract_digest
        self._emit = emit
        self._to_run_time = to_run_time
        self._pool = WorkerPool(run_dir / "logs")
        self.summary = RunSummary()

        self._buffer = TrajectoryBuffer(
            group_size=recipe.learner.samples_per_group, next_prompt=recovered.consumed_prompts
        )
        self._dispatcher = Dispatcher(recipe, tasks, tokenizer, recovered)
        self._swaps = SwapCoordinator()
        self._trained_version = -1
        self._busy_step: int | None = None
        self._step_facts: dict[str, float] = {}
        self._final_requested = False
        self._final_written = False
        self._evaluations = EvaluationSchedule(recipe, tasks, tokenizer)

    # ------------------------------------------------------------------ life of the run

    def run(self) -> RunSummary:
        """Train to the last step.

        Raises:
            WorkerLostError: a worker died or made no progress for `watchdog.seconds`.
            RunError: a worker reported an error, or workers disagree on the numerics contract.
        """
        try:
            self._start_workers()
            self._restore()
            while not self._complete():
                self._handle_next_message()
                self._advance()
        except BaseException:
            self._pool.kill()
            raise
        self._pool.stop()
        self.summary.lost = self._journal_completed - self._consumed - self._buffer.sample_count
        return self.summary

    def _start_workers(self) -> None:
        replicas = [f"rollout-{index}" for index in range(self._recipe.rollout.replicas)]
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM) for _ in replicas]
        text = recipe_to_wire(self._recipe)
        self._learner = self._pool.start(
            "learner", "learner", weight_sockets=[publisher for publisher, _ in pairs]
        )
        self._rollouts = [
            self._pool.start("rollout", name, weight_sockets=[subscriber])
            for name, (_, subscriber) in zip(replicas, pairs, strict=True)
        ]
        self._dispatcher.attach(self._rollouts)
        self._swaps.attach(frozenset(replicas))
        self._learner.waiting_for = "loading the model"
        self._learner.send(
            messages.StartLearner(text, str(self._run_dir), self._recovered.checkpoint_version)
        )
        for index, rollout in enumerate(self._rollouts):
            rollout.waiting_for = "loading the model"
            rollout.send(messages.StartRollout(text, index))
        self._hellos: dict[str, messages.Hello] = {}

    def _restore(self) -> None:
        """Put what an earlier process had completed back where it was."""
        recovered = self._recovered
        self._consumed = recovered.consumed_trajectories
        self._journal_completed = recovered.consumed_trajectories
        self._replay = list(recovered.planned_steps)
        for payload in recovered.trajectories:
            self._journal_completed += 1
            self._buffer.add(Trajectory.from_bytes(payload))
        for entry in recovered.evaluations:
            self._evaluations.mark_done(entry.version)
            self.summary.add_evaluation(entry.phase, entry.reward)

    def _complete(self) -> bool:
        """The last version is saved, serves everywhere, and is evaluated."""
        return self._final_written and self._evaluations.complete

    # ------------------------------------------------------------------ messages

    def _handle_next_message(self) -> None:
        try:
            worker, message = self._pool.inbox.get(timeout=POLL_SECONDS)
        except queue.Empty:
            self._pool.check_watchdog(self._recipe.watchdog.seconds)
            return
        self._handle(worker, message)
        # Take what has queued up meanwhile: decisions are made once for all of it.
        with contextlib.suppress(queue.Empty):
            while True:
                self._handle(*self._pool.inbox.get_nowait())
        self._pool.check_watchdog(self._recipe.watchdog.seconds)

    def _handle(self, worker: Worker, message: object) -> None:
        match message:
            case messages.Hello():
                self._on_hello(worker, message)
            case messages.Progress():
                if message.activity == "warm start":
                    self._emit(
                        "warm_start", step=message.step, steps=message.steps, loss=message.loss
                    )
            case messages.WeightsReady():
                self._on_weights_ready(message)
            case messages.StepFinished():
                self._on_step_finished(message)
            case messages.CheckpointWritten():
                self._journal.append(CheckpointSaved(version=message.version))
                self._journal.compact(message.kept[0], self._recipe.learner.samples_per_group)
                self._emit("checkpoint", version=message.version, seconds=message.seconds)
            case messages.FinalWritten():
                self._final_written = True
                self._learner.waiting_for = ""
            case messages.Generated():
                self._on_generated(Trajectory.from_bytes(message.payload))
            case messages.VersionStaged():
                self._swaps.staged(worker.name, message)
            case messages.VersionRefused():
                raise RunError(
                    f"{worker.name} refused weight version {message.version}: {message.reason}; "
                    f"it went on serving the version before"
                )
            case messages.VersionCommitted():
                self._on_committed(worker.name, message)
            case messages.EngineActivity():
                self._on_activity(worker, message)
            case messages.WorkerFailed():
                raise RunError(f"{worker.name}: {message.reason}")
            case WorkerLost():
                raise WorkerLostError(
                    f"{worker.name} (process {worker.process.pid}) {message.reason}; "
                    f"its log: {worker.log}"
                )
            case _:
                raise RunError(f"{worker.name} sent {type(message).__name__}, which is unexpected")

    def _on_hello(self, worker: Worker, hello: messages.Hello) -> None:
        worker.waiting_for = ""
        if worker is self._learner:
            worker.waiting_for = "preparing the first weight version"
        if hello.contract_digest != self._contract_digest:
            raise RunError(
                f"{worker.name} computes under numerics contract {hello.contract_digest}, the "
                f"run under {self._contract_digest}; use one release of Lockstep for all workers"
            )
        self._hellos[worker.name] = hello
        layouts = {entry.layout_digest for entry in self._hellos.values()}
        if len(layouts) > 1:
            raise RunError(
                "learner and rollout engines describe different weights (layout digests "
                f"{', '.join(sorted(layouts))}); give both the same model"
            )
        if len(self._hellos) == 1:
            self._emit("model", parameters=hello.parameters, model_bytes=hello.model_bytes)

    def _on_weights_ready(self, message: messages.WeightsReady) -> None:
        self._trained_version = message.version
        self._swaps.published(message.version, message.published_at)
        self._learner.waiting_for = ""

    def _on_step_finished(self, message: messages.StepFinished) -> None:
        self._busy_step = None
        self._learner.waiting_for = ""
        self._trained_version = message.version
        self._swaps.published(message.version, message.published_at)
        expected = self._recovered.step_digests.get(message.step)
        if expected is not None and expected != message.weights_digest:
            self._emit("replay_diverged", step=message.step)
        self._journal.append(
            StepDone(
                step=message.step, version=message.version, weights_digest=message.weights_digest
            )
        )
        event = self._emit(
            "step",
            step=message.step,
            version=message.version,
            started=self._to_run_time(message.started_at),
            ended=self._to_run_time(message.ended_at),
            **message.metrics,
            **self._step_facts,
        )
        self.summary.add_step(event)
        last = message.step == self._recipe.learner.steps
        if last or message.step % self._recipe.checkpoint.every == 0:
            self._learner.send(messages.SaveCheckpoint(message.version))

    def _on_generated(self, trajectory: Trajectory) -> None:
        self._dispatcher.request_finished(trajectory.request_id)
        if trajectory.contract_digest != self._contract_digest:
            raise RunError(
                f"trajectory {trajectory.request_id!r} was sampled under numerics contract "
                f"{trajectory.contract_digest}, the run uses {self._contract_digest}"
            )
        response = self._tokenizer.decode(trajectory.response_ids)
        if self._evaluations.add(trajectory.request_id, response):
            self._finish_evaluation()
            return
        prompt = self._tasks.prompt(trajectory.prompt_index)
        scored = trajectory.with_reward(self._tasks.score(prompt.entry, response))
        self._journal.append(
            TrajectoryDone(
                prompt_index=scored.prompt_index,
                sample_index=scored.sample_index,
                payload=scored.to_bytes(),
            )
        )
        self._journal_completed += 1
        self._buffer.add(scored)
        self._dispatcher.sample_finished(scored)

    def _on_committed(self, replica: str, message: messages.VersionCommitted) -> None:
        event = self._emit("swap", **self._swaps.committed(replica, message, self._to_run_time))
        if message.version > 0:
            self.summary.add_swap(event)

    def _on_activity(self, worker: Worker, message: messages.EngineActivity) -> None:
        event = self._emit(
            "rollout",
            replica=worker.name,
            started=self._to_run_time(message.started_at),
            ended=self._to_run_time(message.ended_at),
            busy_seconds=message.busy_seconds,
            tokens=message.tokens,
            prefill_tokens=message.prefill_tokens,
            cached_tokens=message.cached_tokens,
            running=message.running,
            waiting=message.waiting,
            version=message.version,
        )
        self.summary.add_rollout(event)

    # ------------------------------------------------------------------ decisions

    def _advance(self) -> None:
        if self._trained_version < 0 or len(self._hellos) < len(self._pool.workers):
            return
        self._commit_staged()
        if self._swaps.committed_version < 0:
            return
        self._start_evaluation()
        if self._evaluations.exclusive:
            return
        self._plan_step()
        self._dispatch()

    def _commit_staged(self) -> None:
        version = self._swaps.begin_commit()
        if version is not None:
            for rollout in self._rollouts:
                rollout.send(messages.CommitVersion(version))

    def _plan_step(self) -> None:
        recipe = self._recipe
        if self._trained_version >= recipe.learner.steps:
            self._request_final()
            return
        if self._busy_step is not None:
            return
        step = self._trained_version + 1
        if self._replay:
            planned = self._replay.pop(0)
            groups = self._buffer.take_prompts(planned.prompt_indices)
        else:
            groups = self._buffer.take(recipe.learner.groups_per_step)
            if groups is None:
                return
            indices = tuple(group.prompt_index for group in groups)
            self._journal.append(StepPlanned(step=step, prompt_indices=indices))
        self._send_step(step, groups)

    def _request_final(self) -> None:
        if not self._final_requested:
            self._final_requested = True
            self._learner.expect("writing the final checkpoint")
            self._learner.send(messages.SaveFinal())

    def _send_step(self, step: int, groups: list[Group]) -> None:
        trajectories = [sample for group in groups for sample in group.samples]
        self._step_facts = batch_facts(trajectories, self._trained_version)
        self._consumed += len(trajectories)
        for sample in trajectories[:SAMPLES_SHOWN_PER_STEP]:
            self._emit(
                "sample",
                version=self._trained_version,
                prompt=self._tasks.prompt(sample.prompt_index).text,
                response=self._tokenizer.decode(sample.response_ids),
                reward=sample.reward,
            )
        for sample in trajectories:
            self._learner.send(messages.StepTrajectory(step, sample.to_bytes()))
        every = self._recipe.drift.every
        audit = every > 0 and step % every == 0
        self._learner.expect(f"training step {step}")
        self._busy_step = step
        self._learner.send(messages.RunStep(step, len(trajectories), audit))

    def _dispatch(self) -> None:
        accepted = self._consumed + self._buffer.sample_count
        self._dispatcher.dispatch(
            self._swaps.committed_version, accepted // self._recipe.learner.samples_per_group
        )

    # ------------------------------------------------------------------ evaluation

    def _start_evaluation(self) -> None:
        evaluation = self._evaluations.begin(self._swaps.committed_version)
        if evaluation is not None:
            for requests in evaluation.requests(len(self._rollouts)):
                self._dispatcher.send(requests)

    def _finish_evaluation(self) -> None:
        result = self._evaluations.finish()
        if result is None:
            return
        self._journal.append(
            Evaluated(version=result.version, reward=result.reward, phase=result.phase)
        )
        self._emit(
            "evaluation",
            version=result.version,
            reward=result.reward,
            prompts=result.prompts,
            phase=result.phase,
        )
        self.summary.add_evaluation(result.phase, result.reward)
