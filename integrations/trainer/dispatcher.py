"""Which prompts are in flight, and on which replica."""

from __future__ import annotations

from collections.abc import Sequence

from integrations.trainer import messages
from integrations.trainer.buffer import AdmissionRule
from integrations.trainer.journal import RecoveredState
from integrations.trainer.launcher import Worker
from integrations.trainer.recipe import Recipe
from integrations.trainer.sampling import group_requests
from integrations.trainer.tasks import TaskStream
from integrations.trainer.tokenizer import Tokenizer
from integrations.trainer.trajectory import GenerationRequest, Trajectory


class Dispatcher:
    """Sends prompts to the rollout replicas as far as the staleness rule admits them.

    Args:
        recipe: the validated recipe.
        tasks, tokenizer: where prompts come from and how they become tokens.
        recovered: prompts that an earlier process began and did not finish go first.
    """

    def __init__(
        self, recipe: Recipe, tasks: TaskStream, tokenizer: Tokenizer, recovered: RecoveredState
    ) -> None:
        learner = recipe.learner
        slots = recipe.rollout.max_running * recipe.rollout.replicas
        self._recipe = recipe
        self._tasks = tasks
        self._tokenizer = tokenizer
        self._admission = AdmissionRule(
            max_staleness=recipe.staleness.max,
            groups_per_step=learner.groups_per_step,
            max_concurrent=max(1, slots // learner.samples_per_group),
        )
        self._total_prompts = learner.steps * learner.groups_per_step
        self._next_prompt = recovered.next_prompt_index
        self._unfinished = list(recovered.unfinished_prompts)
        self._replicas: Sequence[Worker] = ()
        self._running: dict[int, set[int]] = {}  # prompt index -> samples still to come
        self._load: dict[str, int] = {}  # replica name -> samples in flight
        self._request_replica: dict[str, str] = {}

    def attach(self, replicas: Sequence[Worker]) -> None:
        """Name the replicas that requests may go to."""
        self._replicas = replicas
        self._load = {replica.name: 0 for replica in replicas}

    def dispatch(self, committed_version: int, accepted_groups: int) -> None:
        """Send as many groups as may start now.

        Args:
            committed_version: the version that every replica serves.
            accepted_groups: groups trained on or waiting to be, whole ones.
        """
        capacity = self._admission.capacity(
            version=committed_version, accepted=accepted_groups, running=len(self._running)
        )
        while capacity > 0:
            if self._unfinished:
                index, done = self._unfinished.pop(0)
            elif self._next_prompt < self._total_prompts:
                index, done = self._next_prompt, frozenset()
                self._next_prompt += 1
            else:
                return
            self._send_group(index, done)
            capacity -= 1

    def send(self, requests: Sequence[GenerationRequest]) -> None:
        """Send requests to the replica with the least work."""
        replica = min(self._replicas, key=lambda worker: self._load[worker.name])
        self._load[replica.name] += len(requests)
        for request in requests:
            self._request_replica[request.request_id] = replica.name
        replica.send(messages.Generate(list(requests)))

    def request_finished(self, request_id: str) -> None:
        """A replica has returned this request."""
        self._load[self._request_replica.pop(request_id)] -= 1

    def sample_finished(self, trajectory: Trajectory) -> None:
        """A training sample is scored and in the journal."""
        samples = self._running[trajectory.prompt_index]
        samples.discard(trajectory.sample_index)
        if not samples:
            del self._running[trajectory.prompt_index]

    def _send_group(self, index: int, done: frozenset[int]) -> None:
        """A group goes to one replica, so that its prompt is prefilled once."""
        samples = set(range(self._recipe.learner.samples_per_group)) - done
        self._running[index] = samples
        self.send(
            group_requests(
                self._recipe, self._tokenizer, self._tasks.prompt(index), sorted(samples)
            )
        )
