"""Exceptions of the consistency package.

Everything raised on purpose by ``consistency`` derives from `ConsistencyError`, so that a caller
can catch the whole package with one clause, and also from `ValueError` or `RuntimeError`, so that
code which does not know the package still catches it sensibly.
"""

from __future__ import annotations


class ConsistencyError(Exception):
    """Base of every exception that this package raises on purpose."""


class InvalidInputError(ConsistencyError, ValueError):
    """An argument has a wrong type, shape, dtype or value."""


class UnsupportedError(ConsistencyError, ValueError):
    """A well-formed request that this release does not honour, and will not approximate in
    silence."""


class ContractMismatchError(ConsistencyError, ValueError):
    """Two parties hold numerics contracts that differ, so their bits may differ."""


class KernelLibraryError(ConsistencyError, RuntimeError):
    """The compiled kernel library is missing, cannot be loaded, or is from another revision."""


class RoutingTraceError(ConsistencyError, ValueError):
    """A routing trace is malformed, corrupt, truncated, or does not fit what it is used for."""


class RoutingReplayError(ConsistencyError, RuntimeError):
    """Recording or replaying went out of order: a layer missed, visited twice, or left
    unconsumed."""
