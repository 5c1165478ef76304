"""Which Megatron-Core the hooks are written for."""

# Megatron-Core is installed beside the engine tests only.
# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Final

import megatron.core

from integrations.errors import EngineConfigError

__all__ = ["SUPPORTED_VERSION", "require_version"]

SUPPORTED_VERSION: Final = "0.16.1"
"""The hooks replace methods of this release's classes; another may compute elsewhere."""


def require_version(version: str | None = None) -> None:
    """Checks Megatron-Core's version.

    Args:
        version: by default that of the installed Megatron-Core.

    Raises:
        EngineConfigError: another release.
    """
    version = megatron.core.__version__ if version is None else version
    if version != SUPPORTED_VERSION:
        raise EngineConfigError(
            f"Megatron-Core is {version}, lockstep knows the internals of {SUPPORTED_VERSION}: "
            f"pip install megatron-core=={SUPPORTED_VERSION}"
        )
