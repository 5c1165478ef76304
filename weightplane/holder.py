"""What the owner of a rollout engine does with the versions that are held for it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, TracebackType
from typing import Self

import torch

from weightplane.errors import VersionError
from weightplane.events import SubscriberEvent
from weightplane.layout import Layout
from weightplane.store import VersionStore
from weightplane.swap import Invalidate, Swap
from weightplane.transfer import verify_held
from weightplane.version import VersionRecord, WeightVersion


class VersionHolder:
    """Commits, rolls back and looks at versions, wherever they come from. For one thread.

    Args:
        layout: of every version.
        store: where whole versions are put.
    """

    def __init__(self, layout: Layout, store: VersionStore) -> None:
        self._layout = layout
        self._store = store

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def layout(self) -> Layout:
        """What the engine expects."""
        return self._layout

    @property
    def active(self) -> WeightVersion | None:
        """The version that serves, which tokens are stamped with; None before the first commit."""
        held = self._store.active
        return None if held is None else held.version

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The weights of the active version.

        Raises:
            VersionError: nothing was committed yet, or the subscriber is closed.
        """
        held = self._store.active
        if held is None:
            raise VersionError("no weight version is active: commit one first")
        return MappingProxyType(held.tensors)

    def staged(self) -> WeightVersion | None:
        """The newest version that can be committed now, or None. Takes microseconds."""
        versions = self._store.staged
        return versions[-1] if versions else None

    def wait_staged(self, timeout: float | None = None) -> WeightVersion:
        """Wait for a version that can be committed; returns the newest.

        Raises:
            StalledError: there was none for ``timeout`` seconds.
            LayoutMismatchError: the publisher has another layout.
            PublisherGoneError: none can come any more.
            ChannelError: the publisher does not speak this protocol.
        """
        return self._store.wait_staged(timeout)

    def commit(self, number: int) -> Swap:
        """Make staged version ``number`` the active one. Call it at a token boundary.

        First every registered cache is invalidated, then pointers move. Older staged versions
        retire unseen. The version that served before is retained for `rollback`.

        Returns:
            The new weights, what was invalidated and how long the call took.

        Raises:
            VersionError: that version is not staged; says what it is. The old one goes on serving.
            CommitRefusedError: a cache could not be invalidated. The old version goes on serving.
        """
        return self._store.commit(number)

    def rollback(self) -> Swap:
        """Return to the version that was active before, at a token boundary; like `commit`.

        The version rolled back from is retired and cannot come back under its number.

        Raises:
            VersionError: no previous version is retained.
            CommitRefusedError: a cache could not be invalidated. The present version goes on.
        """
        return self._store.rollback()

    def register_cache(self, name: str, invalidate: Invalidate) -> None:
        """Name something derived from the weights that a swap makes stale.

        Args:
            name: for reports and errors, for example ``"prefix cache"``. invalidate: called as
            ``invalidate(new_version, old_version_or_None)`` in every commit and
                rollback, in the caller's thread, before the swap, in the order of registration. If
                it raises, the swap is refused: a cache that might be stale is never served.
        """
        self._store.register_cache(name, invalidate)

    def fileno(self) -> int:
        """A descriptor that is readable while `events` has something, for an owner's `select`."""
        return self._store.event_descriptor

    def events(self) -> tuple[SubscriberEvent, ...]:
        """What happened since the last call: connected, staged, aborted, lost; oldest first."""
        return self._store.take_events()

    def verify(self) -> None:
        """Digest the active weights again, as they lie in memory now.

        Raises:
            DigestMismatchError: something wrote into them; names the tensor.
            VersionError: nothing is active.
        """
        held = self._store.active
        if held is None:
            raise VersionError("no weight version is active: commit one first")
        verify_held(held.manifest, held.buffer.bytes)

    def records(self) -> tuple[VersionRecord, ...]:
        """The lives of the versions seen here: the last 64 that ended, and all that have not."""
        return self._store.records

    def close(self, timeout: float = 5.0) -> None:
        """Let go of every version; tensors that the engine still holds stay valid.

        Raises:
            StalledError: a thread did not end within ``timeout`` seconds.
        """
        self._store.close()
