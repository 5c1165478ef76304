"""Exceptions raised by ``integrations``: one base class, one subclass per kind of mistake."""

from __future__ import annotations

__all__ = [
    "BenchError",
    "BufferStateError",
    "CheckpointError",
    "EngineConfigError",
    "IntegrationError",
    "JournalError",
    "LearnerError",
    "ModelConfigError",
    "ModelSourceError",
    "RecipeError",
    "RequestError",
    "RunError",
    "RunLockError",
    "SwapError",
    "TaskError",
    "TokenizerError",
    "TrajectoryError",
    "WorkerLostError",
]


class IntegrationError(RuntimeError):
    """Base of every error that ``integrations`` raises on purpose."""


class BenchError(IntegrationError, ValueError):
    """A measurement does not exist, or cannot be taken as asked for."""


class ModelConfigError(IntegrationError, ValueError):
    """A model configuration is malformed, or asks for a feature that the decoder does not have."""


class CheckpointError(IntegrationError):
    """A checkpoint file or one of its tensors is missing, damaged or of the wrong shape."""


class EngineConfigError(IntegrationError, ValueError):
    """An engine of somebody else is set up in a way that the contract cannot be kept in."""


class RequestError(IntegrationError, ValueError):
    """A generation request cannot be served, or names a request the engine does not hold."""


class SwapError(IntegrationError, ValueError):
    """New weights do not fit the running model."""


class TrajectoryError(IntegrationError, ValueError):
    """A trajectory contradicts itself or its bytes are damaged."""


class BufferStateError(IntegrationError, ValueError):
    """A sample or group does not fit the state of the buffer: unknown, duplicate, not admitted."""


class JournalError(IntegrationError):
    """The journal of a run is damaged, contradicts itself, or cannot be written."""


class ModelSourceError(IntegrationError):
    """The model that a recipe names cannot be found, imported or read."""


class RecipeError(IntegrationError, ValueError):
    """A recipe is malformed, or asks for something impossible; one line that names the field."""


class RunLockError(IntegrationError):
    """A run directory is in use by another process, or cannot be locked."""


class TaskError(IntegrationError, ValueError):
    """A task does not exist, is configured wrongly, or cannot give what it is asked for."""


class TokenizerError(IntegrationError, ValueError):
    """A text or token id does not fit the tokenizer, or the tokenizer cannot be loaded."""


class RunError(IntegrationError):
    """A training run cannot start, or cannot go on."""


class WorkerLostError(RunError):
    """A worker process died, or made no progress for as long as the watchdog allows."""


class LearnerError(IntegrationError):
    """The learner cannot take its next step (for example, a loss or gradient is not finite)."""
