"""Checkpoints of the learner: complete or not there, verified when they are read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from integrations.errors import CheckpointError
from integrations.trainer.atomic_directory import (
    atomic_directory,
    remove_directory,
    remove_leftovers,
)

__all__ = ["checkpoint_versions", "load_state", "prune", "save_state"]

Groups = dict[str, dict[str, Tensor]]

TENSORS = "optimizer.safetensors"
STATE = "state.json"
_SEPARATOR = "/"
_NAME = re.compile(r"version-(\d{6,})")
_READ_BYTES = 16 << 20


def checkpoint_versions(folder: Path) -> list[int]:
    """Versions with a checkpoint in ``folder``, ascending; removes what interrupted writes left."""
    if not folder.is_dir():
        return []
    remove_leftovers(folder)
    found = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(match.group(1)) for match in found if match)


def save_state(folder: Path, version: int, groups: Groups, facts: dict[str, Any]) -> Path:
    """Write one checkpoint; it appears under its name only when it is whole and on the disk.

    Args:
        folder: of all checkpoints of the run.
        version: weight version that the tensors belong to.
        groups: tensors by group and name, for example ``master`` and ``exp_avg``.
        facts: small JSON values to store beside them.

    Raises:
        CheckpointError: the disk is full or cannot be written; earlier checkpoints are untouched.
    """
    target = _path(folder, version)
    flat = {
        f"{group}{_SEPARATOR}{name}": tensor.contiguous()
        for group, tensors in groups.items()
        for name, tensor in tensors.items()
    }
    try:
        with atomic_directory(target) as partial:
            save_file(flat, partial / TENSORS)
            state = {**facts, "version": version, "digest": _digest(partial / TENSORS)}
            state["state_digest"] = _state_digest(state)
            (partial / STATE).write_text(json.dumps(state, indent=2, sort_keys=True) + "\n")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write checkpoint {target}: {error}") from error
    return target


def load_state(folder: Path, version: int) -> tuple[Groups, dict[str, Any]]:
    """Read and verify one checkpoint.

    Raises:
        CheckpointError: a file is missing or damaged; names it, and how to go on without it.
    """
    path = _path(folder, version)
    instead = f"delete {path} to resume from the checkpoint before it"
    try:
        state = json.loads((path / STATE).read_text())
        if state.pop("state_digest") != _state_digest(state):
            raise CheckpointError(f"{path / STATE} is damaged (its digest differs); {instead}")
        if state["version"] != version:
            raise CheckpointError(f"{path} holds version {state['version']}; {instead}")
        if state["digest"] != _digest(path / TENSORS):
            raise CheckpointError(f"{path / TENSORS} is damaged (its digest differs); {instead}")
        flat = load_file(path / TENSORS)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, SafetensorError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}; {instead}") from error
    groups: Groups = {}
    for key, tensor in flat.items():
        group, _, name = key.partition(_SEPARATOR)
        groups.setdefault(group, {})[name] = tensor
    return groups, state


def prune(folder: Path, keep: int) -> list[int]:
    """Delete all but the newest ``keep`` checkpoints; returns the versions that stay."""
    versions = checkpoint_versions(folder)
    for version in versions[:-keep]:
        remove_directory(_path(folder, version))
    return versions[-keep:]


def _path(folder: Path, version: int) -> Path:
    return folder / f"version-{version:06d}"


def _state_digest(state: dict[str, Any]) -> str:
    text = json.dumps(state, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(text.encode())


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            digest.update(data)
    return digest.hexdigest()
