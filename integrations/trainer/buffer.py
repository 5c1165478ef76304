"""When a prompt may be sampled, and which trajectories make the next batch.

Both rules together bound staleness. A prompt is admitted only if the batch that will consume it, in
prompt order, is at most ``max_staleness`` versions ahead of the version that serves; and batches do
consume in prompt order, so that no prompt is overtaken by others with shorter answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from integrations.errors import BufferStateError
from integrations.trainer.trajectory import Trajectory

__all__ = ["AdmissionRule", "Group", "TrajectoryBuffer"]


@dataclass(frozen=True, slots=True)
class AdmissionRule:
    """The admission rule of AReaL (arXiv 2505.24298), counted in groups.

        capacity = min(max_concurrent - running,
                       (max_staleness + version + 1) * groups_per_step - (accepted + running))

    Attributes:
        max_staleness: eta; 0 is synchronous training.
        groups_per_step: groups of one training batch.
        max_concurrent: most groups being sampled at a time.
    """

    max_staleness: int
    groups_per_step: int
    max_concurrent: int

    def __post_init__(self) -> None:
        if self.max_staleness < 0 or self.groups_per_step < 1 or self.max_concurrent < 1:
            raise BufferStateError(
                f"admission rule {self}: max_staleness must be >= 0, the other two >= 1"
            )

    def capacity(self, *, version: int, accepted: int, running: int) -> int:
        """Groups that may be started now; negative after the limits were lowered.

        Args:
            version: weight version that serves.
            accepted: groups completed so far, consumed or not.
            running: groups being sampled.
        """
        fresh = (self.max_staleness + version + 1) * self.groups_per_step - (accepted + running)
        return min(self.max_concurrent - running, fresh)


@dataclass(frozen=True, slots=True)
class Group:
    """Every sample of one prompt, in the order of their indices."""

    prompt_index: int
    samples: tuple[Trajectory, ...]


class TrajectoryBuffer:
    """Collects samples into groups and hands out complete groups in prompt order.

    Args:
        group_size: samples of one prompt.
        next_prompt: the prompt that is consumed next.
    """

    def __init__(self, group_size: int, next_prompt: int = 0) -> None:
        if group_size < 1:
            raise BufferStateError(f"group_size is {group_size}; use at least 1")
        self._group_size = group_size
        self._next_prompt = next_prompt
        self._groups: dict[int, dict[int, Trajectory]] = {}

    @property
    def sample_count(self) -> int:
        """Samples held, of complete and incomplete groups."""
        return sum(len(group) for group in self._groups.values())

    @property
    def complete_groups(self) -> int:
        """Groups held with every sample."""
        return sum(len(group) == self._group_size for group in self._groups.values())

    def add(self, sample: Trajectory) -> None:
        """Take in one finished sample, in any order.

        Raises:
            BufferStateError: it came before, its prompt was consumed already, or its index is not
                within the group.
        """
        index, place = sample.prompt_index, sample.sample_index
        if not 0 <= place < self._group_size:
            raise BufferStateError(
                f"sample {place} of prompt {index} is not within groups of {self._group_size}"
            )
        if index < self._next_prompt or place in self._groups.get(index, ()):
            raise BufferStateError(f"sample {place} of prompt {index} came twice")
        self._groups.setdefault(index, {})[place] = sample

    def take(self, count: int) -> list[Group] | None:
        """Remove and return the next ``count`` groups in prompt order; None until complete."""
        indices = range(self._next_prompt, self._next_prompt + count)
        if any(len(self._groups.get(index, ())) < self._group_size for index in indices):
            return None
        return self.take_prompts(indices)

    def take_prompts(self, indices: Sequence[int]) -> list[Group]:
        """Remove and return these groups, to repeat a step that was planned before a restart.

        Raises:
            BufferStateError: one of them is not complete here.
        """
        for index in indices:
            if len(self._groups.get(index, ())) < self._group_size:
                raise BufferStateError(f"prompt {index} was planned for a step but is not complete")
        groups = [
            Group(index, tuple(sample for _, sample in sorted(self._groups.pop(index).items())))
            for index in indices
        ]
        self._next_prompt = max(self._next_prompt, *(index + 1 for index in indices))
        return groups
