"""The life of a weight version.

::

    announced -> staged -> committed -> retired
        |           |--------------------^
        '-> aborted

*announced*: a publisher offers it. *staged*: every byte has arrived here and was verified; nothing
serves it. *committed*: it serves, or served and is kept for a rollback. *retired*: its memory may
be reused; a staged version that is superseded before anybody commits it retires unseen. *aborted*:
it never became whole here. The last two are final: a failed transfer is tried again under a new
number, so that one number never stands for two attempts.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from weightplane.errors import InvalidArgumentError, VersionError


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """The identity of one set of weights.

    Attributes:
        number: grows with every version; the number that tokens are stamped with.
        base: manifest digest of the version this one is a delta against; None if sent in full.
        manifest: digest over every tensor's name, dtype, shape and bytes (`Manifest.digest`).
        created: seconds since the epoch, on the publisher's clock; for people to read.
    """

    number: int
    base: str | None
    manifest: str
    created: float

    def __post_init__(self) -> None:
        check_number(self.number)
        if not self.manifest:
            raise InvalidArgumentError("the manifest digest of a weight version is empty")


def check_number(number: int) -> None:
    """Raise `InvalidArgumentError` unless ``number`` can be a version number; zero can."""
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise InvalidArgumentError(f"weight version is {number!r}; use an integer >= 0")


class VersionState(enum.StrEnum):
    """Where a version is in its life, seen from one process."""

    ANNOUNCED = "announced"
    STAGED = "staged"
    COMMITTED = "committed"
    RETIRED = "retired"
    ABORTED = "aborted"


TRANSITIONS: Mapping[VersionState, frozenset[VersionState]] = MappingProxyType(
    {
        VersionState.ANNOUNCED: frozenset({VersionState.STAGED, VersionState.ABORTED}),
        VersionState.STAGED: frozenset({VersionState.COMMITTED, VersionState.RETIRED}),
        VersionState.COMMITTED: frozenset({VersionState.RETIRED}),
        VersionState.RETIRED: frozenset(),
        VersionState.ABORTED: frozenset(),
    }
)
"""The states that may follow each state."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """What moving one version to one subscriber cost.

    ``byte_count`` counts the bytes moved; the two durations are the subscriber thread's, and
    do not overlap.
    """

    byte_count: int
    copy_seconds: float
    verify_seconds: float


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """The life of one version so far, seen from one process or by it about one subscriber.

    Times are `time.monotonic` seconds, which Linux counts from boot, so that records of different
    processes on one machine compare. ``pause_seconds`` is the time that the commit kept its caller.
    ``reason`` says why the version was aborted or retired.
    """

    version: WeightVersion
    state: VersionState
    announced_at: float
    staged_at: float | None = None
    committed_at: float | None = None
    ended_at: float | None = None
    transfer: Transfer | None = None
    pause_seconds: float | None = None
    reason: str = ""


class VersionLedger:
    """The versions that one process knows, and the guard of their life cycle.

    Not thread-safe: its owner's lock protects it.

    Args:
        keep: how many finished versions (retired or aborted) to remember.
    """

    def __init__(self, keep: int = 64) -> None:
        if keep < 1:
            raise InvalidArgumentError(f"keep is {keep}; use at least 1")
        self._keep = keep
        self._records: dict[int, VersionRecord] = {}
        self._latest: int | None = None

    @property
    def latest(self) -> int | None:
        """The greatest number ever announced, or None."""
        return self._latest

    def reannounce(self, version: WeightVersion, at: float | None = None) -> VersionRecord:
        """Enter a version that another source offers, after the first one failed.

        What is staged or committed already stays so; what was aborted or retired is announced
        again. A number still never stands for two sets of weights.

        Raises:
            VersionError: the number was used for another manifest, or is old and forgotten.
        """
        known = self._records.get(version.number)
        if known is None or self._latest is None or version.number > self._latest:
            return self.announce(version, at)
        if known.version.manifest != version.manifest:
            raise VersionError(
                f"weight version {version.number} has manifest {version.manifest} at this source, "
                f"it had {known.version.manifest} before: one number stands for one set of weights"
            )
        if known.state in (VersionState.STAGED, VersionState.COMMITTED, VersionState.ANNOUNCED):
            return known
        stamp = time.monotonic() if at is None else at
        return self._store(VersionRecord(version, VersionState.ANNOUNCED, stamp))

    def check_next(self, number: int) -> None:
        """Raise `VersionError` unless ``number`` is greater than every number announced so far."""
        check_number(number)
        if self._latest is not None and number <= self._latest:
            raise VersionError(
                f"weight version {number} comes after version {self._latest}: "
                "numbers must grow, and a number is never used twice"
            )

    def announce(self, version: WeightVersion, at: float | None = None) -> VersionRecord:
        """Enter a new version.

        Raises:
            VersionError: its number is not greater than every number before.
        """
        self.check_next(version.number)
        self._latest = version.number
        stamp = time.monotonic() if at is None else at
        record = VersionRecord(version, VersionState.ANNOUNCED, stamp)
        self._records[version.number] = record
        self._forget_oldest()
        return record

    def stage(
        self, number: int, transfer: Transfer | None = None, at: float | None = None
    ) -> VersionRecord:
        """Every byte arrived and was verified."""
        stamp = time.monotonic() if at is None else at
        record = self._require(number, VersionState.STAGED)
        return self._store(replace(record, staged_at=stamp, transfer=transfer))

    def commit(
        self, number: int, pause_seconds: float | None = None, at: float | None = None
    ) -> VersionRecord:
        """It serves now."""
        stamp = time.monotonic() if at is None else at
        record = self._require(number, VersionState.COMMITTED)
        return self._store(replace(record, committed_at=stamp, pause_seconds=pause_seconds))

    def retire(self, number: int, reason: str) -> VersionRecord:
        """Its memory may be reused."""
        return self._end(number, VersionState.RETIRED, reason)

    def abort(self, number: int, reason: str) -> VersionRecord:
        """It never became whole."""
        return self._end(number, VersionState.ABORTED, reason)

    def get(self, number: int) -> VersionRecord | None:
        """The record of version ``number``; None if it was never announced or long ago ended."""
        return self._records.get(number)

    def records(self) -> tuple[VersionRecord, ...]:
        """Every version that is remembered, in the order of the numbers."""
        return tuple(self._records.values())

    def _require(self, number: int, state: VersionState) -> VersionRecord:
        record = self._records.get(number)
        if record is None:
            raise VersionError(f"weight version {number} was never announced, or ended long ago")
        if state not in TRANSITIONS[record.state]:
            because = f" ({record.reason})" if record.reason else ""
            raise VersionError(
                f"weight version {number} is {record.state}{because} and cannot become {state}"
            )
        return replace(record, state=state)

    def _end(self, number: int, state: VersionState, reason: str) -> VersionRecord:
        record = self._require(number, state)
        ended = self._store(replace(record, ended_at=time.monotonic(), reason=reason))
        self._forget_oldest()
        return ended

    def _store(self, record: VersionRecord) -> VersionRecord:
        self._records[record.version.number] = record
        return record

    def _forget_oldest(self) -> None:
        finished = [
            number for number, record in self._records.items() if record.ended_at is not None
        ]
        for number in finished[: max(0, len(finished) - self._keep)]:
            del self._records[number]
