"""The learner worker: trains what the controller sends and publishes every new version."""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from pathlib import Path

import torch

from consistency.correction import make_correction
from integrations.errors import RunError
from integrations.trainer.checkpoint import load_state, prune, save_state
from integrations.trainer.learner.learner import Example, Learner
from integrations.trainer.messages import (
    CheckpointWritten,
    FinalWritten,
    Progress,
    RunStep,
    SaveCheckpoint,
    SaveFinal,
    StartLearner,
    StepFinished,
    StepTrajectory,
    Stop,
    WeightsReady,
)
from integrations.trainer.recipe import Recipe
from integrations.trainer.tasks import TaskStream
from integrations.trainer.trajectory import Trajectory
from integrations.trainer.worker import ControlLink
from integrations.trainer.worker_model import WorkerModel, first_message, recipe_from_wire
from weightplane.channel import Channel
from weightplane.publisher import Publisher

CHECKPOINTS = "checkpoints"
FINAL = "final"
# Far above any prompt index of the policy-gradient phase, so that the two never share prompts.
WARM_START_PROMPTS = 1 << 29


class LearnerWorker:
    """Owns the learner, its checkpoints and the publishing end of the weight plane."""

    def __init__(
        self,
        link: ControlLink,
        recipe: Recipe,
        run_dir: Path,
        weight_sockets: list[socket.socket],
    ) -> None:
        self._link = link
        self._recipe = recipe
        self._run_dir = run_dir
        self._model = WorkerModel.of(recipe)
        correction = make_correction(recipe.correction.kind, **recipe.correction.limits)
        weights = self._model.initial_weights()
        self._learner = Learner(
            recipe, self._model.decoder(), weights, correction, quantiser=self._model.quantiser
        )
        self._publisher = Publisher(self._model.layout, stall_seconds=recipe.watchdog.seconds)
        for end in weight_sockets:
            self._publisher.attach(Channel(end))
        self._pending: defaultdict[int, list[Trajectory]] = defaultdict(list)
        link.send(self._model.hello("learner"))

    def prepare(self, resume_version: int | None) -> None:
        """Reach the first version of this process, by a checkpoint or by the warm start."""
        if resume_version is None:
            self._warm_start()
        else:
            self._restore(resume_version)
        digest, published_at = self._publish()
        self._link.send(WeightsReady(self._learner.version, digest, published_at))

    def run(self) -> None:
        """Serve until told to stop."""
        while True:
            message = self._link.receive()
            match message:
                case StepTrajectory():
                    self._pending[message.step].append(Trajectory.from_bytes(message.payload))
                case RunStep():
                    self._step(message)
                case SaveCheckpoint():
                    self._save_checkpoint(message.version)
                case SaveFinal():
                    self._save_final()
                case Stop():
                    self._publisher.close()
                    return
                case _:
                    raise RunError(f"a learner does not know {type(message).__name__}")

    def _warm_start(self) -> None:
        settings = self._recipe.warm_start
        if settings is None:
            return
        tasks, tokenizer = TaskStream(self._recipe.task), self._model.tokenizer()

        def examples(step: int) -> list[Example]:
            first = WARM_START_PROMPTS + (step - 1) * settings.batch_size
            pairs = []
            for index in range(first, first + settings.batch_size):
                prompt = tasks.prompt(index)
                ids = tokenizer.prompt_ids(prompt.text, self._recipe.task.system)
                pairs.append((ids, tokenizer.response_ids(tasks.answer(prompt.entry))))
            return pairs

        def on_step(step: int, loss: float) -> None:
            self._link.send(Progress("warm start", step=step, steps=settings.steps, loss=loss))

        self._learner.warm_start(examples, on_step)

    def _publish(self) -> tuple[str, float]:
        published_at = time.monotonic()
        state = self._model.to_wire(self._learner.optimizer.served_weights)
        version = self._publisher.publish(state, self._learner.version)
        return version.manifest, published_at

    def _step(self, message: RunStep) -> None:
        trajectories = self._pending.pop(message.step, [])
        if len(trajectories) != message.count or message.step != self._learner.version + 1:
            raise RunError(
                f"step {message.step} came with {len(trajectories)} of {message.count} "
                f"trajectories after version {self._learner.version}"
            )
        started = time.monotonic()
        metrics = self._learner.step(
            trajectories,
            audit=message.audit,
            on_progress=lambda: self._link.send(Progress("training")),
        )
        ended = time.monotonic()
        metrics["learner_tokens_per_second"] = metrics["tokens"] / max(ended - started, 1e-9)
        digest, published_at = self._publish()
        self._link.send(
            StepFinished(
                step=message.step,
                version=self._learner.version,
                weights_digest=digest,
                published_at=published_at,
                started_at=started,
                ended_at=ended,
                metrics=metrics,
            )
        )

    def _save_checkpoint(self, version: int) -> None:
        started = time.monotonic()
        folder = self._run_dir / CHECKPOINTS
        optimizer = self._learner.optimizer
        save_state(folder, version, optimizer.state(), {"optimizer_steps": optimizer.steps})
        kept = prune(folder, self._recipe.checkpoint.keep)
        self._link.send(CheckpointWritten(version, kept, time.monotonic() - started))

    def _restore(self, version: int) -> None:
        groups, facts = load_state(self._run_dir / CHECKPOINTS, version)
        self._learner.optimizer.load_state(groups, facts["optimizer_steps"])
        self._learner.version = version

    def _save_final(self) -> None:
        folder = self._run_dir / FINAL
        self._model.save(folder, self._learner.weights)
        self._link.send(FinalWritten(str(folder)))


def run_learner(link: ControlLink, weight_sockets: list[socket.socket]) -> None:
    """Body of the learner process."""
    start = first_message(link, StartLearner)
    recipe = recipe_from_wire(start.recipe)
    torch.set_num_threads(recipe.learner.threads)
    worker = LearnerWorker(link, recipe, Path(start.run_dir), weight_sockets)
    worker.prepare(start.resume_version)
    worker.run()
