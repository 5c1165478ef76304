"""Errors of a training run."""

from __future__ import annotations

from integrations.errors import IntegrationError


class LearnerError(IntegrationError):
    """The learner cannot take its next step (for example, a loss or gradient is not finite)."""


class RunError(IntegrationError):
    """A training run cannot start, or cannot go on."""


class WorkerLostError(RunError):
    """A worker process died or stopped making progress."""
