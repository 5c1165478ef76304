"""Staging a version where it lies: digests while it is written, and a lock instead of a copy."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace

import xxhash

from weightplane.digest import Manifest
from weightplane.layout import Layout
from weightplane.messages import Announce, Begin
from weightplane.p2p import Offer, SharedReader
from weightplane.sharing import SharedVersion, SharedVersions
from weightplane.transfer import REFETCHES, Run, check_digest, cut_into_runs
from weightplane.version import Transfer

logger = logging.getLogger("weightplane")

_RUN_BYTES = 4 << 20
"""Bytes digested at a time: so little is left to do when the publisher has written its last."""


class Following:
    """The digests of a slot's tensors, as far as its bytes are final.

    Args:
        slot: which slot.
        claim: what it is stamped with.
        view: its bytes.
        runs: the tensors in it, in order.
    """

    def __init__(self, slot: int, claim: int, view: memoryview, runs: tuple[Run, ...]) -> None:
        self.slot = slot
        self.claim = claim
        self.digests: list[bytes] = []
        self.seconds = 0.0
        self._view = view
        self._runs = runs
        self._next = 0
        self._hasher = xxhash.xxh3_128()

    @property
    def done(self) -> bool:
        """Whether every tensor is digested."""
        return self._next == len(self._runs)

    def advance(self, written: int) -> bool:
        """Digest one run, if it lies in the first ``written`` bytes; returns whether it did."""
        if self.done or self._runs[self._next].stop > written:
            return False
        begun = time.perf_counter()
        for part in self._runs[self._next].parts:
            self._hasher.update(self._view[part.start : part.stop])
            if part.last:
                self.digests.append(self._hasher.digest())
                self._hasher.reset()
        self._next += 1
        self.seconds += time.perf_counter() - begun
        return True

    def finish(self, on_progress: Callable[[int], None]) -> None:
        """Digest the rest of a slot that is written."""
        while not self.done:
            stop = self._runs[self._next].stop
            self.advance(stop)
            on_progress(stop)


class SlotSharer:
    """Shows versions to one subscriber in the slots of its publisher; for the staging thread.

    Args:
        reader: the subscriber's half of the transport.
        layout: of every version.
        offer: what the reader was opened from.
        versions: the versions of this subscriber that are kept in slots.
    """

    def __init__(
        self, reader: SharedReader, layout: Layout, offer: Offer, versions: SharedVersions
    ) -> None:
        self._reader = reader
        self._layout = layout
        self._offer = offer
        self._versions = versions
        self._runs = cut_into_runs(layout, _RUN_BYTES)
        self._following: Following | None = None

    @property
    def following(self) -> bool:
        """Whether bytes may become final that are not digested yet."""
        return self._following is not None and not self._following.done

    def follow(self, begin: Begin) -> None:
        """A slot is being written."""
        self._following = self._start(begin.slot, begin.claim)

    def advance(self) -> bool:
        """Digest one run of the slot that is being written, if it is final; whether one was."""
        following = self._following
        if following is None:
            return False
        return following.advance(self._reader.written(following.slot, following.claim))

    def stage(
        self, announce: Announce, manifest: Manifest, on_progress: Callable[[int], None]
    ) -> tuple[SharedVersion, Transfer] | None:
        """Keep and verify an announced version in its slot.

        Returns:
            The version and what it cost; None if the slot cannot be kept from here.

        Raises:
            DigestMismatchError: a tensor differs from its digest, looked at afresh too.
        """
        following, self._following = self._following, None
        shared = self._reader.share(announce.slot, announce.claim)
        if shared is None:
            return None
        try:
            if following is None or (following.slot, following.claim) != (
                announce.slot,
                announce.claim,
            ):
                following = self._start(announce.slot, announce.claim)
            following.finish(on_progress)
            seconds = following.seconds
            for attempt in range(REFETCHES + 1):
                wrong = self._wrong(manifest, following.digests)
                if wrong is None:
                    break
                if attempt == REFETCHES:
                    check_digest(manifest, wrong, following.digests[wrong])
                logger.warning(
                    "tensor %r is corrupt, torn or was written into, and is looked at afresh "
                    "(%d of %d)",
                    manifest.layout.tensors[wrong].name, attempt + 1, REFETCHES,
                )  # fmt: skip
                fresh = self._look_afresh(announce)
                if fresh is None:
                    return None
                shared.release()
                shared = fresh
                following = self._start(announce.slot, announce.claim)
                following.finish(on_progress)
                seconds += following.seconds
        except BaseException:
            shared.release()
            raise
        self._versions.add(shared)
        return shared, Transfer(self._layout.byte_count, 0.0, seconds)

    def vacate(self, slot: int) -> None:
        """The publisher needs a slot: what is kept in it becomes this process's own copy."""
        for version in self._versions.in_slot(slot):
            # The last tensor may be gone by now, and the mapping with it.
            with contextlib.suppress(IndexError):
                version.make_private()
        self._reader.renew(slot)

    def replace(self, slot: int, descriptors: tuple[int, ...], endpoint: bytes) -> None:
        """The publisher has put other memory in the place of a slot."""
        self._reader.replace(
            slot, replace(self._offer, slots=1, descriptors=descriptors, endpoint=endpoint)
        )

    def _look_afresh(self, announce: Announce) -> SharedVersion | None:
        self._reader.renew(announce.slot)
        return self._reader.share(announce.slot, announce.claim)

    def _start(self, slot: int, claim: int) -> Following:
        return Following(slot, claim, self._reader.view(slot), self._runs)

    def _wrong(self, manifest: Manifest, digests: list[bytes]) -> int | None:
        """The first tensor that differs from its digest."""
        pairs = zip(digests, manifest.digests, strict=True)
        return next((index for index, (one, two) in enumerate(pairs) if one != two), None)
