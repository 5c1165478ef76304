"""Exceptions raised by ``integrations``: one base class, one subclass per kind of mistake."""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "IntegrationError",
    "ModelConfigError",
    "RequestError",
    "SwapError",
    "TrajectoryError",
]


class IntegrationError(RuntimeError):
    """Base of every error that ``integrations`` raises on purpose."""


class ModelConfigError(IntegrationError, ValueError):
    """A model configuration is malformed, or asks for a feature that the decoder does not have."""


class CheckpointError(IntegrationError):
    """A checkpoint file or one of its tensors is missing, damaged or of the wrong shape."""


class RequestError(IntegrationError, ValueError):
    """A generation request cannot be served, or names a request the engine does not hold."""


class SwapError(IntegrationError, ValueError):
    """New weights do not fit the running model."""


class TrajectoryError(IntegrationError, ValueError):
    """A trajectory contradicts itself or its bytes are damaged."""
