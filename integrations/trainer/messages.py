"""What the controller and its workers say to each other.

Every message is a tagged msgspec struct; the wire knows no other type, so a frame either decodes
into one of these or is refused. Times are `time.monotonic()` seconds, which all processes of one
Linux machine share.
"""

from __future__ import annotations

import msgspec

from integrations.trainer.trajectory import GenerationRequest


class StartLearner(msgspec.Struct, frozen=True, tag="start_learner"):
    """First message to the learner: the resolved recipe (YAML) and where to continue."""

    recipe: str
    run_dir: str
    resume_version: int | None


class StepTrajectory(msgspec.Struct, frozen=True, tag="step_trajectory"):
    """One trajectory of a coming step; sent singly so that no frame grows with the batch."""

    step: int
    payload: bytes


class RunStep(msgspec.Struct, frozen=True, tag="run_step"):
    """Train on the `count` trajectories sent for `step`, then publish version `step`."""

    step: int
    count: int
    audit: bool


class SaveCheckpoint(msgspec.Struct, frozen=True, tag="save_checkpoint"):
    """Write the learner's state after `version` durably."""

    version: int


class SaveFinal(msgspec.Struct, frozen=True, tag="save_final"):
    """Write the last version as a checkpoint that other tools load."""


class StartRollout(msgspec.Struct, frozen=True, tag="start_rollout"):
    """First message to a rollout worker."""

    recipe: str
    replica: int


class Generate(msgspec.Struct, frozen=True, tag="generate"):
    """Sample these requests, in any order and any batch."""

    requests: list[GenerationRequest]


class CommitVersion(msgspec.Struct, frozen=True, tag="commit_version"):
    """Serve `version` from the next token boundary on; every replica has it staged."""

    version: int


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Finish at once and exit."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A worker is ready; the controller compares the digests of all workers."""

    role: str
    contract_digest: str
    layout_digest: str
    parameters: int
    model_bytes: int


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """A sign of work for the watchdog and, for the warm start, for people."""

    activity: str
    step: int = 0
    steps: int = 0
    loss: float | None = None


class WeightsReady(msgspec.Struct, frozen=True, tag="weights_ready"):
    """The learner announced the version that the run starts (or goes on) from."""

    version: int
    weights_digest: str
    published_at: float


class StepFinished(msgspec.Struct, frozen=True, tag="step_finished"):
    """A step is trained and its version announced to the rollout engines."""

    step: int
    version: int
    weights_digest: str
    published_at: float
    started_at: float
    ended_at: float
    metrics: dict[str, float]


class CheckpointWritten(msgspec.Struct, frozen=True, tag="checkpoint_written"):
    version: int
    kept: list[int]
    seconds: float


class FinalWritten(msgspec.Struct, frozen=True, tag="final_written"):
    folder: str


class Generated(msgspec.Struct, frozen=True, tag="generated"):
    """One finished trajectory."""

    payload: bytes


class VersionStaged(msgspec.Struct, frozen=True, tag="version_staged"):
    version: int
    announced_at: float
    staged_at: float
    bytes: int


class VersionRefused(msgspec.Struct, frozen=True, tag="version_refused"):
    """Staging failed; the replica goes on serving the version it has."""

    version: int
    reason: str


class VersionCommitted(msgspec.Struct, frozen=True, tag="version_committed"):
    version: int
    committed_at: float
    pause_seconds: float


class EngineActivity(msgspec.Struct, frozen=True, tag="engine_activity"):
    """What a rollout engine did between two instants."""

    started_at: float
    ended_at: float
    busy_seconds: float
    tokens: int
    prefill_tokens: int
    cached_tokens: int
    running: int
    waiting: int
    version: int


class WorkerFailed(msgspec.Struct, frozen=True, tag="worker_failed"):
    """The worker met an error that ends the run; `reason` is one line for people."""

    reason: str
    details: str = ""


ToWorker = (
    StartLearner
    | StepTrajectory
    | RunStep
    | SaveCheckpoint
    | SaveFinal
    | StartRollout
    | Generate
    | CommitVersion
    | Stop
)
FromWorker = (
    Hello
    | Progress
    | WeightsReady
    | StepFinished
    | CheckpointWritten
    | FinalWritten
    | Generated
    | VersionStaged
    | VersionRefused
    | VersionCommitted
    | EngineActivity
    | WorkerFailed
)
