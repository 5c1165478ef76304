"""Committing, skipping and rolling back, and what a swap invalidates."""

from __future__ import annotations

import pytest

from weightplane import (
    CommitRefusedError,
    InvalidArgumentError,
    VersionError,
)


def stage(publisher, subscriber, weights, number):
    publisher.publish(weights, number)
    publisher.wait(number, 10)
    assert subscriber.staged().number == number


def test_nothing_is_active_before_the_first_commit(publisher, join):
    engine = join(publisher)
    assert engine.active is None
    assert engine.staged() is None
    with pytest.raises(VersionError, match="commit one first"):
        _ = engine.tensors


def test_a_committed_version_is_exactly_what_was_published(publisher, join, state, same):
    engine = join(publisher)
    publisher.wait_subscribers(1, 10)
    for number in range(1, 5):
        stage(publisher, engine, state(number), number)
        swap = engine.commit(number)
        assert same(swap.tensors, state(number))
        assert same(engine.tensors, state(number))
        assert swap.version == engine.active == publisher.newest
        assert (swap.previous.number if swap.previous else None) == (number - 1 or None)


def test_a_swap_names_the_tensors_that_changed(publisher, join, state):
    engine = join(publisher)
    publisher.wait_subscribers(1, 10)
    weights = state(1)
    stage(publisher, engine, weights, 1)
    assert engine.commit(1).changed_tensors() == tuple(sorted(weights))
    weights["layers.0.router"][1, 1] += 1
    weights["scale"] += 1
    stage(publisher, engine, weights, 2)
    assert engine.commit(2).changed_tensors() == ("layers.0.router", "scale")
    assert engine.rollback().changed_tensors() == ("layers.0.router", "scale")


def test_rolling_back_serves_the_previous_bits_and_retires_the_newer(publisher, join, state, same):
    engine = join(publisher, retain=2)
    publisher.wait_subscribers(1, 10)
    for number in (1, 2, 3):
        stage(publisher, engine, state(number), number)
        engine.commit(number)
    assert [version.number for version in engine.status().retained] == [2, 1]
    for number in (2, 1):
        swap = engine.rollback()
        assert swap.version.number == number
        assert swap.previous is not None
        assert swap.previous.number == number + 1
        assert same(engine.tensors, state(number))
    with pytest.raises(VersionError, match="no previous weight version"):
        engine.rollback()
    with pytest.raises(VersionError, match=r"3 is retired \(rolled back to weight version 2\)"):
        engine.commit(3)
    stage(publisher, engine, state(4), 4)
    assert same(engine.commit(4).tensors, state(4))


def test_without_retention_there_is_nothing_to_roll_back_to(publisher, join, state):
    engine = join(publisher, retain=0)
    publisher.wait_subscribers(1, 10)
    for number in (1, 2):
        stage(publisher, engine, state(number), number)
        engine.commit(number)
    with pytest.raises(VersionError, match="no previous"):
        engine.rollback()


def test_the_owner_may_skip_to_a_newer_version(publisher, join, state, same):
    engine = join(publisher)
    publisher.wait_subscribers(1, 10)
    stage(publisher, engine, state(1), 1)
    stage(publisher, engine, state(2), 2)
    assert [version.number for version in engine.status().staged] == [1, 2]
    assert engine.staged().number == 2
    assert same(engine.commit(2).tensors, state(2))
    with pytest.raises(VersionError, match=r"1 is retired \(skipped: weight version 2 was commit"):
        engine.commit(1)


def test_an_older_staged_version_stays_committable_beside_a_newer_one(publisher, join, state, same):
    engine = join(publisher)
    publisher.wait_subscribers(1, 10)
    stage(publisher, engine, state(1), 1)
    stage(publisher, engine, state(2), 2)
    assert same(engine.commit(1).tensors, state(1))
    assert same(engine.commit(2).tensors, state(2))


@pytest.mark.parametrize("stage_ahead", [1, 2, 3])
def test_staged_versions_beyond_the_limit_retire_unseen_oldest_first(
    publisher, join, state, stage_ahead
):
    engine = join(publisher, stage_ahead=stage_ahead)
    publisher.wait_subscribers(1, 10)
    for number in range(6):
        stage(publisher, engine, state(number), number)
    expected = list(range(6 - stage_ahead, 6))
    assert [version.number for version in engine.status().staged] == expected
    with pytest.raises(VersionError, match=r"0 is retired .*unseen"):
        engine.commit(0)


def test_caches_are_invalidated_before_the_swap_and_named_in_its_record(publisher, join, state):
    engine = join(publisher)
    publisher.wait_subscribers(1, 10)
    calls = []

    def invalidate(new, old):
        calls.append((engine.active and engine.active.number, old and old.number, new.number))

    engine.register_cache("prefix cache", invalidate)
    engine.register_cache("fused projections", lambda new, old: None)
    for number in (1, 2):
        stage(publisher, engine, state(number), number)
        assert engine.commit(number).invalidated == ("prefix cache", "fused projections")
    engine.rollback()
    assert calls == [(None, None, 1), (1, 1, 2), (2, 2, 1)]
    with pytest.raises(InvalidArgumentError, match="'prefix cache' is registered already"):
        engine.register_cache("prefix cache", invalidate)


def test_a_cache_must_not_commit_while_it_is_invalidated(publisher, join, state):
    engine = join(publisher)
    publisher.wait_subscribers(1, 10)
    stage(publisher, engine, state(1), 1)
    engine.register_cache("reentrant", lambda new, old: engine.commit(new.number) and None)
    with pytest.raises(CommitRefusedError, match="must not commit"):
        engine.commit(1)


def test_a_version_that_is_being_committed_is_not_retired_by_a_newer_one(
    publisher, join, state, same
):
    engine = join(publisher, stage_ahead=1)
    publisher.wait_subscribers(1, 10)
    stage(publisher, engine, state(1), 1)

    def invalidate(new, old):
        if new.number == 1:
            publisher.publish(state(2), 2)
            publisher.wait(2, 10)

    engine.register_cache("slow", invalidate)
    assert same(engine.commit(1).tensors, state(1))
    assert same(engine.commit(2).tensors, state(2))


def test_committing_what_is_not_staged_says_what_it_is(publisher, join, state):
    engine = join(publisher)
    publisher.wait_subscribers(1, 10)
    with pytest.raises(VersionError, match=r"7 was never announced here.*staged versions: none"):
        engine.commit(7)
    stage(publisher, engine, state(1), 1)
    engine.commit(1)
    with pytest.raises(VersionError, match="1 is committed; staged versions: none"):
        engine.commit(1)
