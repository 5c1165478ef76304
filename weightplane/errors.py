"""Exceptions of the weightplane package.

Everything raised on purpose by ``weightplane`` derives from `WeightPlaneError`, so that a caller
can catch the whole package with one clause, and also from `ValueError` or `RuntimeError`, so that
code which does not know the package still catches it sensibly.
"""

from __future__ import annotations


class WeightPlaneError(Exception):
    """Base of every exception that this package raises on purpose."""


class InvalidArgumentError(WeightPlaneError, ValueError):
    """An argument has a wrong type or value."""


class LayoutError(WeightPlaneError, ValueError):
    """A layout is malformed, or a state does not have the tensors, shapes and dtypes it names."""


class LayoutMismatchError(WeightPlaneError, ValueError):
    """Publisher and subscriber hold different layouts; nothing was sent."""


class VersionError(WeightPlaneError, ValueError):
    """A version number is unknown, out of order, or in a state that forbids what was asked."""


class DigestMismatchError(WeightPlaneError, RuntimeError):
    """Bytes differ from the digest that was announced for them: corrupt or torn."""


class ChannelError(WeightPlaneError, RuntimeError):
    """The peer sent what is no message of this protocol, or not one it may send now."""


class ChannelClosedError(ChannelError):
    """The peer closed its end of the channel, or its process died."""


class PublisherGoneError(WeightPlaneError, RuntimeError):
    """No further version can arrive; what is active keeps serving and can still be rolled back."""


class ShmSpaceError(WeightPlaneError, RuntimeError):
    """Shared memory has too little room for the arenas; nothing was left behind."""


class TransferError(WeightPlaneError, RuntimeError):
    """A transport could not move bytes: the owner of a slot is gone, silent, or refused."""


class TransportUnavailableError(WeightPlaneError, RuntimeError):
    """A transport cannot run here: its package, a library or a device is missing; says which."""


class StalledError(WeightPlaneError, RuntimeError):
    """A watchdog saw no progress for the configured time; the message names who and since when."""


class CommitRefusedError(WeightPlaneError, RuntimeError):
    """A swap was refused, for example because a cache could not be invalidated; nothing changed."""


class ClosedError(WeightPlaneError, RuntimeError):
    """The publisher or subscriber was closed and can no longer do what was asked."""


class StagingMemoryError(WeightPlaneError, RuntimeError):
    """The subscriber's process cannot get memory for another staging buffer."""


class PlanError(WeightPlaneError, ValueError):
    """No plan leads from one layout to the other; the message names the tensor or slice."""


class RecordingError(WeightPlaneError, ValueError):
    """A loader does something with a weight that is no copy, or leaves a parameter unloaded."""
