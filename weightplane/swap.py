"""Versions in a subscriber's memory, and the record of changing from one to another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from weightplane.digest import Manifest
from weightplane.errors import CommitRefusedError, InvalidArgumentError
from weightplane.memory import StagingBuffer
from weightplane.sharing import SharedVersion
from weightplane.version import WeightVersion

Invalidate = Callable[[WeightVersion, WeightVersion | None], None]
"""Called as ``invalidate(new, old)`` in the middle of a swap; raises to refuse it."""


class DerivedCaches:
    """What is derived from the weights and has to go when they do, by name."""

    def __init__(self) -> None:
        self._caches: dict[str, Invalidate] = {}

    def register(self, name: str, invalidate: Invalidate) -> None:
        """Add a cache; names are unique."""
        if name in self._caches:
            raise InvalidArgumentError(f"a cache called {name!r} is registered already")
        self._caches[name] = invalidate

    def invalidate(self, new: WeightVersion, old: WeightVersion | None) -> tuple[str, ...]:
        """Invalidate every cache, in the order of registration; returns their names.

        Before the swap, because dropping a cache is always right, while serving one that belongs to
        other weights never is: if one cannot be dropped, the old version goes on with what is left.

        Raises:
            CommitRefusedError: a cache could not be invalidated.
        """
        names: list[str] = []
        for name, invalidate in tuple(self._caches.items()):
            try:
                invalidate(new, old)
            except Exception as error:
                serving = "none" if old is None else old.number
                raise CommitRefusedError(
                    f"weight version {new.number} was not swapped in: cache {name!r} "
                    f"could not be invalidated ({error!r}); "
                    f"weight version {serving} goes on serving"
                ) from error
            names.append(name)
        return tuple(names)


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A whole, verified version in memory."""

    version: WeightVersion
    manifest: Manifest
    buffer: StagingBuffer | SharedVersion
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Swap:
    """What a commit or rollback did.

    Attributes:
        version: what serves now.
        previous: what served before, or None.
        tensors: the new weights by name: views of one flat buffer, valid as long as they are held.
            Keep no `Swap` for longer than its weights: it holds the buffer too.
        invalidated: names of the caches that were invalidated, in order.
        pause_seconds: how long the call kept its caller, invalidation included.
    """

    version: WeightVersion
    previous: WeightVersion | None
    tensors: Mapping[str, torch.Tensor] = field(repr=False)
    invalidated: tuple[str, ...]
    pause_seconds: float
    _manifest: Manifest = field(repr=False)
    _previous_manifest: Manifest | None = field(repr=False)

    @classmethod
    def between(
        cls, target: Held, previous: Held | None, invalidated: tuple[str, ...], seconds: float
    ) -> Swap:
        """The record of a swap from ``previous`` to ``target`` that took ``seconds``."""
        return cls(
            version=target.version,
            previous=None if previous is None else previous.version,
            tensors=MappingProxyType(target.tensors),
            invalidated=invalidated,
            pause_seconds=seconds,
            _manifest=target.manifest,
            _previous_manifest=None if previous is None else previous.manifest,
        )

    def changed_tensors(self) -> tuple[str, ...]:
        """Names of the tensors whose bytes differ from the previous version's, by their digests.

        What is derived from the others is still good. All names if there was no previous version.
        """
        if self._previous_manifest is None:
            return tuple(spec.name for spec in self._manifest.layout.tensors)
        return self._manifest.changed_since(self._previous_manifest)
