"""When a weight version may be committed: once every replica has it staged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from integrations.trainer.messages import VersionCommitted, VersionStaged


class SwapCoordinator:
    """Follows every version from its publication until it serves on all replicas.

    Attributes:
        committed_version: the version that every replica serves; -1 before the first.
    """

    def __init__(self) -> None:
        self.committed_version = -1
        self._replicas: frozenset[str] = frozenset()
        self._published_at: dict[int, float] = {}
        self._staged: dict[int, dict[str, VersionStaged]] = {}
        self._commits: dict[int, set[str]] = {}

    def attach(self, replicas: frozenset[str]) -> None:
        """Name the replicas that must have a version."""
        self._replicas = replicas

    def published(self, version: int, at: float) -> None:
        """The learner has published a version, at a `time.monotonic()` time."""
        self._published_at[version] = at

    def staged(self, replica: str, message: VersionStaged) -> None:
        """A replica holds a whole version."""
        self._staged.setdefault(message.version, {})[replica] = message

    def begin_commit(self) -> int | None:
        """The version to commit now, or None.

        Versions are staged in order; a newer one that is whole everywhere supersedes the rest.
        """
        ready = [
            version
            for version, replicas in self._staged.items()
            if replicas.keys() == self._replicas
            and version not in self._commits
            # A replica may report before the learner's own message has arrived.
            and version in self._published_at
        ]
        if not ready:
            return None
        version = max(ready)
        self._commits[version] = set(self._replicas)
        return version

    def committed(
        self, replica: str, message: VersionCommitted, to_run_time: Callable[[float], float]
    ) -> dict[str, Any]:
        """A replica serves a version.

        Returns:
            The fields of the `swap` event.
        """
        version = message.version
        staged = self._staged[version][replica]
        facts = {
            "version": version,
            "replica": replica,
            "bytes": staged.bytes,
            "announced": to_run_time(staged.announced_at),
            "staged": to_run_time(staged.staged_at),
            "committed": to_run_time(message.committed_at),
            "stage_seconds": staged.staged_at - staged.announced_at,
            "swap_seconds": message.committed_at - self._published_at[version],
            "pause_seconds": message.pause_seconds,
        }
        waiting = self._commits[version]
        waiting.discard(replica)
        if not waiting:
            self.committed_version = max(self.committed_version, version)
            self._forget_up_to(version)
        return facts

    def _forget_up_to(self, version: int) -> None:
        for old in [number for number in self._staged if number <= version]:
            del self._staged[old]
            self._commits.pop(old, None)
        for old in [number for number in self._published_at if number < version]:
            del self._published_at[old]
