"""Moving the bytes of one version, and digesting them on the way.

Both sides digest what they have just written, while it is still in the cache, so that digests cost
one pass over warm memory instead of one over cold. Copies and digests of more than a few kilobytes
run without Python's interpreter lock. Taking the lock back costs up to the switch interval (5 ms)
when the owner runs pure Python, so the subscriber copies runs of many tensors rather than tensor by
tensor.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, wait
from dataclasses import dataclass

import numpy
import torch
import xxhash

from weightplane.digest import Manifest, byte_view
from weightplane.errors import DigestMismatchError
from weightplane.layout import Layout
from weightplane.p2p import Reader
from weightplane.version import Transfer

logger = logging.getLogger("weightplane")

WRITE_BYTES = 512 << 10
"""Bytes the publisher copies before it digests them, while they are in the cache."""

SHOW_BYTES = 1 << 20
"""How many more bytes must be final before readers that follow are told."""

REFETCHES = 2
"""How often a tensor that arrived damaged is read again before its version is given up."""

RUN_BYTES = 8 << 20
"""Bytes the subscriber copies before it digests them: well inside a usual last-level cache."""


@dataclass(frozen=True, slots=True)
class Part:
    """A range of one tensor inside a run; ``last`` if the tensor ends here."""

    index: int
    start: int
    stop: int
    last: bool


@dataclass(frozen=True, slots=True)
class Run:
    """A contiguous range of the flat buffer, and the tensors, or part of one, that lie in it."""

    start: int
    stop: int
    parts: tuple[Part, ...]


def cut_into_runs(layout: Layout, run_bytes: int = RUN_BYTES) -> tuple[Run, ...]:
    """Cut the flat buffer of a whole layout into runs of at most ``run_bytes``.

    Args:
        layout: shard ``i`` holds tensor ``i``, whole.
        run_bytes: most bytes of a run.

    Returns:
        Runs in the order of the offsets; together they cover every shard exactly once.
    """
    runs: list[Run] = []
    parts: list[Part] = []
    for index, shard in enumerate(layout.shards):
        end = shard.offset + layout.shard_bytes(shard)
        if parts and end - parts[0].start > run_bytes:
            runs.append(Run(parts[0].start, parts[-1].stop, tuple(parts)))
            parts = []
        start = shard.offset
        while end - start > run_bytes:
            cut = start + run_bytes
            runs.append(Run(start, cut, (Part(index, start, cut, last=False),)))
            start = cut
        parts.append(Part(index, start, end, last=True))
    runs.append(Run(parts[0].start, parts[-1].stop, tuple(parts)))
    return tuple(runs)


def write_state(
    layout: Layout,
    state: Mapping[str, torch.Tensor],
    slot: memoryview,
    views: Mapping[str, torch.Tensor],
    on_progress: Callable[[int], None] = lambda _: None,
    helpers: Executor | None = None,
    threads: int = 1,
) -> tuple[Manifest, Transfer]:
    """Copy ``state`` into a slot and digest every tensor as it lies there.

    Args:
        layout: a whole layout that ``state`` was checked against.
        state: tensors of any strides, on any device torch copies from.
        slot: the writable bytes, uint8 [layout.size].
        views: ``layout.views`` of the slot.
        on_progress: called, now and then and from any thread, with a growing number: so many bytes
            from the start of the slot are final.
        helpers: threads that copy beside the caller; each tensor is copied by one of them.
        threads: how many copy at a time, the caller included.

    Returns:
        The manifest of what was written, and the cost: seconds of all threads together;
        ``verify_seconds`` is the digests' share.
    """
    work = _Writing(layout, state, slot, views, on_progress)
    waits = [] if helpers is None else [helpers.submit(work.run) for _ in range(threads - 1)]
    try:
        work.run()
    finally:
        # Nobody may write into the slot any more when this returns, with or without an error.
        wait(waits)
    for helper in waits:
        helper.result()
    manifest = Manifest(layout, tuple(work.digests))
    return manifest, Transfer(layout.byte_count, work.copy_seconds, work.digest_seconds)


class _Writing:
    """One state on its way into one slot; `run` takes tensor after tensor until none is left."""

    def __init__(
        self,
        layout: Layout,
        state: Mapping[str, torch.Tensor],
        slot: memoryview,
        views: Mapping[str, torch.Tensor],
        on_progress: Callable[[int], None],
    ) -> None:
        self.digests = [b""] * len(layout.shards)
        self.copy_seconds = self.digest_seconds = 0.0
        self._layout = layout
        self._state = state
        self._target = numpy.frombuffer(slot, numpy.uint8)
        self._views = views
        self._on_progress = on_progress
        self._todo = deque(range(len(layout.shards)))
        self._finished = [False] * len(layout.shards)
        self._first = 0
        self._shown = 0
        self._changed = threading.Lock()

    def run(self) -> None:
        """Copy tensors until none is left to begin; an error leaves the others nothing to do."""
        copy_seconds = digest_seconds = 0.0
        try:
            while True:
                try:
                    # The end of a deque is taken by one thread alone.
                    index = self._todo.popleft()
                except IndexError:
                    break
                copied, digested = self._write(index)
                copy_seconds += copied
                digest_seconds += digested
        except BaseException:
            self._todo.clear()
            raise
        with self._changed:
            self.copy_seconds += copy_seconds
            self.digest_seconds += digest_seconds

    def _write(self, index: int) -> tuple[float, float]:
        shard = self._layout.shards[index]
        tensor = self._state[shard.tensor].detach()
        end = shard.offset + self._layout.shard_bytes(shard)
        direct = tensor.device.type == "cpu" and tensor.is_contiguous()
        source = byte_view(tensor) if direct else None
        hasher = xxhash.xxh3_128()
        copy_seconds = digest_seconds = 0.0
        begun = time.perf_counter()
        if source is None:
            self._views[shard.tensor].copy_(tensor)
        for start in range(shard.offset, end, WRITE_BYTES):
            stop = min(start + WRITE_BYTES, end)
            target = self._target[start:stop]
            if source is not None:
                numpy.copyto(target, source[start - shard.offset : stop - shard.offset])
            copied = time.perf_counter()
            copy_seconds += copied - begun
            hasher.update(target.data)
            begun = time.perf_counter()
            digest_seconds += begun - copied
            if stop - self._shown >= SHOW_BYTES and index == self._first:
                self._show(index, stop, stop == end)
        self.digests[index] = hasher.digest()
        self._show(index, end, True)
        return copy_seconds, digest_seconds

    def _show(self, index: int, stop: int, finished: bool) -> None:
        """Tell how many bytes from the start are final, when it is worth it."""
        with self._changed:
            self._finished[index] = finished
            final = stop if index == self._first else 0
            while self._first < len(self._finished) and self._finished[self._first]:
                shard = self._layout.shards[self._first]
                final = max(final, shard.offset + self._layout.shard_bytes(shard))
                self._first += 1
            if final - self._shown >= SHOW_BYTES:
                self._shown = final
                self._on_progress(final)


def read_verified(
    reader: Reader,
    slot: int,
    manifest: Manifest,
    runs: tuple[Run, ...],
    destination: memoryview,
    on_progress: Callable[[int], None],
    verified: int = 0,
) -> Transfer:
    """Copy a slot into ``destination`` and verify every tensor of the copy.

    Args:
        reader: the subscriber's half of the transport.
        slot: which slot to read.
        manifest: what must arrive.
        runs: ``cut_into_runs(manifest.layout)``.
        destination: writable bytes, uint8 [layout.size]; holds nothing of use after an exception.
        on_progress: called after every run with the bytes done; may raise to stop.
        verified: bytes at the start of ``destination`` that are verified already, the end of a run
            where a tensor ends.

    A tensor that does not match its digest is read again, up to `REFETCHES` times: a chunk that was
    corrupted, cut short, repeated or put in another's place costs its tensor, not the version.

    Raises:
        DigestMismatchError: a tensor differs from its digest; the message names it.
    """
    copy_seconds = verify_seconds = 0.0
    hasher = xxhash.xxh3_128()
    moved = 0
    for run in runs:
        if run.stop <= verified:
            continue
        begun = time.perf_counter()
        reader.read(slot, run.start, destination[run.start : run.stop])
        copied = time.perf_counter()
        for part in run.parts:
            hasher.update(destination[part.start : part.stop])
            if part.last:
                if hasher.digest() != manifest.digests[part.index]:
                    _read_again(reader, slot, manifest, part.index, destination)
                hasher.reset()
            moved += part.stop - part.start
        copy_seconds += copied - begun
        verify_seconds += time.perf_counter() - copied
        on_progress(run.stop)
    return Transfer(moved, copy_seconds, verify_seconds)


def _read_again(
    reader: Reader, slot: int, manifest: Manifest, index: int, destination: memoryview
) -> None:
    """Fetch one tensor until it matches its digest.

    Raises:
        DigestMismatchError: it never did.
    """
    shard = manifest.layout.shards[index]
    place = destination[shard.offset : shard.offset + manifest.layout.shard_bytes(shard)]
    for attempt in range(1, REFETCHES + 1):
        logger.warning(
            "tensor %r arrived corrupt or torn and is read again (%d of %d)",
            shard.tensor, attempt, REFETCHES,
        )  # fmt: skip
        reader.read(slot, shard.offset, place)
        actual = xxhash.xxh3_128_digest(place)
        if actual == manifest.digests[index]:
            return
        if attempt == REFETCHES:
            check_digest(manifest, index, actual)


def verify_held(manifest: Manifest, buffer: memoryview) -> None:
    """Digest a buffer that holds a whole version, where it lies.

    Raises:
        DigestMismatchError: a tensor differs from its digest; the message names it.
    """
    numbers = {spec.name: index for index, spec in enumerate(manifest.layout.tensors)}
    for shard in manifest.layout.shards:
        index = numbers[shard.tensor]
        end = shard.offset + manifest.layout.shard_bytes(shard)
        check_digest(manifest, index, xxhash.xxh3_128_digest(buffer[shard.offset : end]))


def check_digest(manifest: Manifest, index: int, actual: bytes) -> None:
    """Raise `DigestMismatchError` unless tensor ``index`` of the manifest has digest ``actual``."""
    expected = manifest.digests[index]
    if actual != expected:
        spec = manifest.layout.tensors[index]
        raise DigestMismatchError(
            f"tensor {spec.name!r} ({spec}) arrived with digest {actual.hex()}, "
            f"announced was {expected.hex()}: the bytes are corrupt or torn"
        )
