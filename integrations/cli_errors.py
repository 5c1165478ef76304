"""How the command line ends: which errors are expected, their one line, their exit code."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import typer

from integrations.errors import (
    CheckpointError,
    IntegrationError,
    ModelSourceError,
    TokenizerError,
)

__all__ = [
    "BAD_INPUT",
    "FAILED",
    "InputError",
    "Invocation",
    "exit_code",
    "is_expected",
    "one_line",
]

FAILED = 1
BAD_INPUT = 2

# Typer raises its own copies of click's exceptions, and which copy depends on its version; their
# common base is what BadParameter derives from.
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]

# Before a run has begun, these mean that the recipe names something that is not there or not sound.
_NAMED_BY_THE_RECIPE = (CheckpointError, ModelSourceError, TokenizerError)


class InputError(IntegrationError, ValueError):
    """The command line asks for something that cannot be done; the text names it and the fix."""


@dataclass
class Invocation:
    """What one call of the command has to know when an error reaches its end."""

    debug: bool = False
    run_began: bool = False


def is_expected(error: BaseException) -> bool:
    """Whether an error says by itself what is wrong, so that a traceback would only hide it."""
    return isinstance(error, (IntegrationError, OSError, _UsageError, *_bases_of_loaded_packages()))


def one_line(error: BaseException) -> str:
    """The reason in one line."""
    if isinstance(error, _UsageError) and hasattr(error, "format_message"):
        return " ".join(str(error.format_message()).split())  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        where = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else ""
        return f"{where}: {error.strerror}" if where else error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def exit_code(error: BaseException, invocation: Invocation) -> int:
    """2 when another input would help, 1 when the same command may work later."""
    if isinstance(error, _UsageError):
        return BAD_INPUT
    if invocation.run_began or isinstance(error, OSError):
        return FAILED
    return BAD_INPUT if isinstance(error, (ValueError, *_NAMED_BY_THE_RECIPE)) else FAILED


def _bases_of_loaded_packages() -> list[type[Exception]]:
    """The base exceptions of `consistency` and `weightplane`.

    An error of a package exists only where the package has been imported; asking ``sys.modules``
    keeps ``lockstep --help`` from importing torch for it.
    """
    found = []
    names = (("consistency.errors", "ConsistencyError"), ("weightplane.errors", "WeightPlaneError"))
    for module, name in names:
        base = getattr(sys.modules.get(module), name, None)
        if base is not None:
            found.append(base)
    return found
