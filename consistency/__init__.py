"""The trainer and the engine compute the same number; what remains is measured and corrected.

Importing this package needs torch alone. `consistency.kernels` holds the kernels and is imported on
its own, because it loads a compiled library.
"""

from __future__ import annotations

from consistency import correction, metrics, routing_replay
from consistency.contract import NumericsContract
from consistency.errors import (
    ConsistencyError,
    ContractMismatchError,
    InvalidInputError,
    KernelLibraryError,
    RoutingReplayError,
    RoutingTraceError,
    UnsupportedError,
)
from consistency.metrics import MismatchMetrics, mismatch_metrics
from consistency.overrides import batch_invariant, disable, enable
from consistency.patching import patch, unpatch
from consistency.routing_replay import RoutingTrace

__all__ = [
    "ConsistencyError",
    "ContractMismatchError",
    "InvalidInputError",
    "KernelLibraryError",
    "MismatchMetrics",
    "NumericsContract",
    "RoutingReplayError",
    "RoutingTrace",
    "RoutingTraceError",
    "UnsupportedError",
    "batch_invariant",
    "correction",
    "disable",
    "enable",
    "metrics",
    "mismatch_metrics",
    "patch",
    "routing_replay",
    "unpatch",
]
