"""A version is committed only when it is whole on every replica."""

from __future__ import annotations

from integrations.trainer.messages import VersionCommitted, VersionStaged
from integrations.trainer.swaps import SwapCoordinator


def staged(version: int) -> VersionStaged:
    return VersionStaged(version=version, announced_at=1.0, staged_at=1.5, bytes=7)


def committed(version: int) -> VersionCommitted:
    return VersionCommitted(version=version, committed_at=2.0, pause_seconds=0.25)


def coordinator() -> SwapCoordinator:
    swaps = SwapCoordinator()
    swaps.attach(frozenset({"a", "b"}))
    return swaps


def test_a_version_waits_for_every_replica_and_for_the_learners_own_word():
    swaps = coordinator()
    swaps.staged("a", staged(0))
    assert swaps.begin_commit() is None
    swaps.staged("b", staged(0))
    assert swaps.begin_commit() is None  # the learner's message may arrive last
    swaps.published(0, 0.5)
    assert swaps.begin_commit() == 0
    assert swaps.begin_commit() is None  # it is asked for once


def test_a_version_serves_when_the_last_replica_has_committed_it():
    swaps = coordinator()
    swaps.published(0, 0.5)
    for replica in ("a", "b"):
        swaps.staged(replica, staged(0))
    swaps.begin_commit()
    facts = swaps.committed("a", committed(0), lambda seconds: seconds + 100)
    assert swaps.committed_version == -1
    assert facts["swap_seconds"] == 1.5
    assert facts["stage_seconds"] == 0.5
    assert facts["committed"] == 102.0
    swaps.committed("b", committed(0), lambda seconds: seconds)
    assert swaps.committed_version == 0


def test_a_newer_whole_version_supersedes_an_older_one():
    swaps = coordinator()
    for version in (0, 1):
        swaps.published(version, 0.5)
        for replica in ("a", "b"):
            swaps.staged(replica, staged(version))
    assert swaps.begin_commit() == 1
    for replica in ("a", "b"):
        swaps.committed(replica, committed(1), lambda seconds: seconds)
    assert swaps.committed_version == 1
    assert swaps.begin_commit() is None
