"""Getting a version into a staging buffer: by a delta where its base is held, else in full."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy
import xxhash

from weightplane.delta import Delta
from weightplane.digest import Manifest
from weightplane.errors import DigestMismatchError
from weightplane.messages import Announce, DeltaOffer
from weightplane.p2p import Reader
from weightplane.transfer import Run, check_digest, read_verified
from weightplane.version import Transfer

logger = logging.getLogger("weightplane")


def fetch(
    reader: Reader,
    announce: Announce,
    manifest: Manifest,
    runs: tuple[Run, ...],
    destination: memoryview,
    base: memoryview | None,
    on_progress: Callable[[int], None],
    verified: int = 0,
) -> Transfer:
    """Make ``destination`` hold the announced version, verified tensor by tensor.

    Args:
        reader: the subscriber's half of the transport.
        announce: says where the version lies, and its delta if it has one.
        manifest: what must arrive.
        runs: ``cut_into_runs(manifest.layout)``.
        destination: writable bytes, uint8 [layout.size], registered with the reader.
        base: the bytes of the version that the delta is against; None if they are not held here.
        on_progress: called after every run with the bytes done; may raise to stop.
        verified: bytes at the start of ``destination`` that are verified already, a run's end.

    Raises:
        DigestMismatchError: a tensor differs from its digest however often it is read.
        TransferError: the transport cannot reach the bytes.
    """
    offer = announce.delta
    if offer is not None and not verified:
        if base is None:
            logger.warning(
                "weight version %d: its base is not held here, so it is taken in full: "
                "%d bytes instead of %d",
                announce.number, manifest.layout.byte_count, offer.byte_count,
            )  # fmt: skip
        else:
            try:
                return _fetch_delta(
                    reader, announce.slot, offer, manifest, runs, destination, base, on_progress
                )
            except DigestMismatchError as error:
                logger.warning(
                    "weight version %d: the delta does not give it (%s), so it is taken in full",
                    announce.number, error,
                )  # fmt: skip
    return read_verified(reader, announce.slot, manifest, runs, destination, on_progress, verified)


def _fetch_delta(
    reader: Reader,
    slot: int,
    offer: DeltaOffer,
    manifest: Manifest,
    runs: tuple[Run, ...],
    destination: memoryview,
    base: memoryview,
    on_progress: Callable[[int], None],
) -> Transfer:
    """Copy the base run by run, change what the delta says, and verify while it is in the cache."""
    layout = manifest.layout
    if not 0 <= offer.byte_count <= layout.size:
        raise DigestMismatchError(f"a delta of {offer.byte_count} bytes, more than the full state")
    begun = time.perf_counter()
    # The staging buffer is registered, and is overwritten from the base below.
    landing = destination[: offer.byte_count]
    reader.read(slot, offer.offset, landing)
    if xxhash.xxh3_128_digest(landing) != offer.digest:
        raise DigestMismatchError("its bytes are corrupt or torn")
    delta = Delta.parse(numpy.frombuffer(landing, numpy.uint8).copy(), layout.size)
    target = numpy.frombuffer(destination, numpy.uint8)
    source = numpy.frombuffer(base, numpy.uint8)
    copy_seconds = time.perf_counter() - begun
    verify_seconds = 0.0
    hasher = xxhash.xxh3_128()
    for run in runs:
        begun = time.perf_counter()
        numpy.copyto(target[run.start : run.stop], source[run.start : run.stop])
        delta.apply(target, run.start, run.stop)
        copied = time.perf_counter()
        for part in run.parts:
            hasher.update(destination[part.start : part.stop])
            if part.last:
                check_digest(manifest, part.index, hasher.digest())
                hasher.reset()
        copy_seconds += copied - begun
        verify_seconds += time.perf_counter() - copied
        on_progress(run.stop)
    return Transfer(offer.byte_count, copy_seconds, verify_seconds)
