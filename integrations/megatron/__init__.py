"""Megatron-Core in lockstep: shims for the CPU, patches, a loader, routing replay and layouts.

Importing this package does not import Megatron-Core; its modules do, but for `weights`, `batch` and
`layout`.
"""

from __future__ import annotations

__all__: list[str] = []
