"""The durable log of a run: no trajectory is lost and no prompt is skipped or repeated.

Every record is written by one ``write`` call before anything else happens to what it describes, so
a process killed at any moment loses at most the record it was in the middle of. Records that decide
what a resumed run does (plans, finished steps, checkpoints) are also flushed to the disk.

A record is a header (the body's length, the XXH32 of that length, the XXH3-64 of the body) and a
msgpack body. The length has a checksum of its own so that a damaged one, which would point past the
end of the file, is not taken for a record that a crash has cut short. After a checkpoint the log is
written anew without what no resume can need any more, and replaces the old file by a rename.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from integrations.errors import JournalError
from integrations.trainer.atomic_directory import sync_directory

__all__ = [
    "CheckpointSaved",
    "Evaluated",
    "Journal",
    "RecoveredState",
    "StepDone",
    "StepPlanned",
    "Summary",
    "TrajectoryDone",
]

FILE = "journal.log"
_HEADER = struct.Struct("<IIQ")
_LENGTH = struct.Struct("<I")


class Summary(msgspec.Struct, frozen=True, tag="summary"):
    """What the records say that are no longer here: steps, prompts and trajectories consumed."""

    steps: int
    prompts: int
    trajectories: int


class TrajectoryDone(msgspec.Struct, frozen=True, tag="trajectory_done"):
    """One sample is finished and scored."""

    prompt_index: int
    sample_index: int
    payload: bytes


class StepPlanned(msgspec.Struct, frozen=True, tag="step_planned"):
    """These prompts, in this order, are the batch of a step; written before it is sent."""

    step: int
    prompt_indices: tuple[int, ...]


class StepDone(msgspec.Struct, frozen=True, tag="step_done"):
    """A step is trained; ``weights_digest`` identifies the version that it made."""

    step: int
    version: int
    weights_digest: str


class Evaluated(msgspec.Struct, frozen=True, tag="evaluated"):
    version: int
    reward: float
    phase: str


class CheckpointSaved(msgspec.Struct, frozen=True, tag="checkpoint_saved"):
    version: int


Record = Summary | TrajectoryDone | StepPlanned | StepDone | Evaluated | CheckpointSaved
_FLUSHED = (StepPlanned, StepDone, CheckpointSaved)


@dataclass(frozen=True, slots=True)
class RecoveredState:
    """Where a run goes on.

    Attributes:
        checkpoint_version: the checkpoint to load, None to begin with the warm start.
        consumed_prompts, consumed_trajectories: by the steps up to that checkpoint.
        trajectories: payloads of every sample not consumed by those steps.
        planned_steps: steps after the checkpoint whose batch was decided; repeated exactly.
        step_digests: weights digest that each of them gave before.
        unfinished_prompts: (prompt, samples done) of groups that were begun or skipped over.
        next_prompt_index: the first prompt that nothing is known of.
        evaluations: in order.
    """

    checkpoint_version: int | None
    consumed_prompts: int
    consumed_trajectories: int
    trajectories: tuple[bytes, ...]
    planned_steps: tuple[StepPlanned, ...]
    step_digests: dict[int, str]
    unfinished_prompts: tuple[tuple[int, frozenset[int]], ...]
    next_prompt_index: int
    evaluations: tuple[Evaluated, ...]


class Journal:
    """Append-only log of one run; `run_lock` must be held.

    Args:
        folder: created if missing.

    Raises:
        JournalError: the log is damaged somewhere else than at its torn end, or cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / FILE
        self._encoder = msgspec.msgpack.Encoder()
        self.torn_bytes = 0
        """Bytes of a record that a crash had cut short; they were removed."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._records, end = _read(self._path)
            self._descriptor = os.open(
                self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
            )
            self.torn_bytes = os.fstat(self._descriptor).st_size - end
            if self.torn_bytes:
                os.ftruncate(self._descriptor, end)
            sync_directory(folder)
        except OSError as error:
            raise JournalError(f"journal {self._path} cannot be opened: {error}") from error

    def append(self, record: Record) -> None:
        """Write one record.

        Raises:
            JournalError: the disk is full or cannot be written; the log ends before the record.
        """
        frame = self._frame(record)
        size = os.fstat(self._descriptor).st_size
        try:
            written = os.write(self._descriptor, frame)
            if written != len(frame):
                raise OSError(28, "No space left on device")
            if isinstance(record, _FLUSHED):
                os.fdatasync(self._descriptor)
        except OSError as error:
            os.ftruncate(self._descriptor, size)
            raise JournalError(
                f"journal {self._path} cannot be written: {error.strerror}"
            ) from error
        self._records.append(record)

    def recover(self, checkpoint_version: int | None, group_size: int) -> RecoveredState:
        """What the records say about going on from a checkpoint.

        Args:
            checkpoint_version: the newest checkpoint that exists, None if there is none.
            group_size: samples of one prompt.

        Raises:
            JournalError: the log begins after that checkpoint, or ends before it.
        """
        done_steps = checkpoint_version or 0
        summary = self._summary()
        if summary.steps > done_steps:
            raise JournalError(
                f"journal {self._path} begins after step {summary.steps}, but the newest "
                f"checkpoint is of version {done_steps}; restore that folder or start a new run"
            )
        plans = {r.step: r for r in self._records if isinstance(r, StepPlanned)}
        for step in range(summary.steps + 1, max(done_steps, *plans, 0) + 1):
            if step not in plans:
                raise JournalError(
                    f"journal {self._path} does not say what step {step} was trained on, but the "
                    f"newest checkpoint is of version {done_steps}; restore the journal that "
                    "belongs to it or start a new run"
                )
        consumed = [i for step, plan in plans.items() if step <= done_steps
                    for i in plan.prompt_indices]  # fmt: skip
        gone = set(consumed)
        samples: dict[int, dict[int, bytes]] = {}
        for record in self._records:
            if isinstance(record, TrajectoryDone) and record.prompt_index not in gone:
                samples.setdefault(record.prompt_index, {})[record.sample_index] = record.payload
        first = summary.prompts + len(consumed)
        last = max(samples, default=first - 1)
        unfinished = tuple(
            (index, frozenset(samples.get(index, {})))
            for index in range(first, last + 1)
            if len(samples.get(index, {})) < group_size
        )
        return RecoveredState(
            checkpoint_version=checkpoint_version,
            consumed_prompts=first,
            consumed_trajectories=summary.trajectories + len(consumed) * group_size,
            trajectories=tuple(p for _, group in sorted(samples.items()) for p in group.values()),
            planned_steps=tuple(plan for step, plan in sorted(plans.items()) if step > done_steps),
            step_digests={
                r.step: r.weights_digest
                for r in self._records
                if isinstance(r, StepDone) and r.step > done_steps
            },
            unfinished_prompts=unfinished,
            next_prompt_index=last + 1,
            evaluations=tuple(r for r in self._records if isinstance(r, Evaluated)),
        )

    def compact(self, oldest_checkpoint: int, group_size: int) -> None:
        """Drop the trajectories and plans of the steps up to the oldest checkpoint that is kept."""
        summary = self._summary()
        consumed = [
            index
            for record in self._records
            if isinstance(record, StepPlanned) and record.step <= oldest_checkpoint
            for index in record.prompt_indices
        ]
        if not consumed:
            return
        gone = set(consumed)
        kept: list[Record] = [
            Summary(
                steps=oldest_checkpoint,
                prompts=summary.prompts + len(consumed),
                trajectories=summary.trajectories + len(consumed) * group_size,
            )
        ]
        for record in self._records:
            match record:
                case TrajectoryDone() if record.prompt_index in gone:
                    continue
                case StepPlanned() | StepDone() if record.step <= oldest_checkpoint:
                    continue
                case CheckpointSaved() if record.version < oldest_checkpoint:
                    continue
                case Summary():
                    continue
                case _:
                    kept.append(record)
        self._replace(kept)

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _replace(self, records: list[Record]) -> None:
        temporary = self._folder / f".{FILE}.partial"
        try:
            with temporary.open("wb") as file:
                for record in records:
                    file.write(self._frame(record))
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(self._path)
            # Otherwise a power failure could bring the old file back, without what is flushed from
            # now on to the new one.
            sync_directory(self._folder)
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise JournalError(f"journal {self._path} cannot be rewritten: {error}") from error
        os.close(self._descriptor)
        self._descriptor = descriptor
        self._records = records

    def _summary(self) -> Summary:
        first = self._records[0] if self._records else None
        return first if isinstance(first, Summary) else Summary(0, 0, 0)

    def _frame(self, record: Record) -> bytes:
        body = self._encoder.encode(record)
        checksum = xxhash.xxh3_64_intdigest(body)
        return _HEADER.pack(len(body), _length_checksum(len(body)), checksum) + body


def _read(path: Path) -> tuple[list[Record], int]:
    """The records of a log, and where the last whole one ends."""
    if not path.exists():
        return [], 0
    data = path.read_bytes()
    records: list[Record] = []
    end = 0
    for start, body in _bodies(path, data):
        try:
            records.append(msgspec.msgpack.decode(body, type=Record))
        except msgspec.DecodeError as error:
            raise JournalError(
                f"journal {path}: the record at byte {start} is unknown: {error}"
            ) from error
        end = start + _HEADER.size + len(body)
    return records, end


def _bodies(path: Path, data: bytes) -> Iterator[tuple[int, bytes]]:
    """Offset and body of each whole record; stops at a torn end.

    A crash tears only the last record. It may be short, or zeros where a power failure caught the
    file growing. Anything else is damage, and what follows it must not vanish in silence.
    """
    start = 0
    while start + _HEADER.size <= len(data):
        length, length_checksum, checksum = _HEADER.unpack_from(data, start)
        stop = start + _HEADER.size + length
        body = data[start + _HEADER.size : stop]
        length_holds = length_checksum == _length_checksum(length)
        if length_holds and len(body) < length:
            return
        if not length_holds or xxhash.xxh3_64_intdigest(body) != checksum:
            if not data[stop if length_holds else start :].strip(b"\0"):
                return
            raise JournalError(
                f"journal {path}: the record at byte {start} is damaged; restore the file from a "
                f"backup, or give up what follows: truncate -s {start} {path}"
            )
        yield start, body
        start = stop


def _length_checksum(length: int) -> int:
    return xxhash.xxh32_intdigest(_LENGTH.pack(length))
