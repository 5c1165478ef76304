"""The life of a version."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightplane.errors import InvalidArgumentError, VersionError
from weightplane.version import TRANSITIONS, Transfer, VersionLedger, VersionState, WeightVersion


def version(number: int) -> WeightVersion:
    return WeightVersion(number, None, "digest", 0.0)


def advance(ledger: VersionLedger, number: int, state: VersionState) -> None:
    match state:
        case VersionState.STAGED:
            ledger.stage(number)
        case VersionState.COMMITTED:
            ledger.commit(number)
        case VersionState.RETIRED:
            ledger.retire(number, "superseded")
        case VersionState.ABORTED:
            ledger.abort(number, "corrupt")
        case VersionState.ANNOUNCED:
            ledger.announce(version(number))


@settings(max_examples=100, deadline=None)
@given(steps=st.lists(st.sampled_from(list(VersionState)), max_size=6))
def test_only_the_documented_transitions_are_possible(steps):
    ledger = VersionLedger()
    ledger.announce(version(0))
    state = VersionState.ANNOUNCED
    for step in steps:
        if step in TRANSITIONS[state]:
            advance(ledger, 0, step)
            state = step
        else:
            with pytest.raises(VersionError):
                advance(ledger, 0, step)
        record = ledger.get(0)
        assert record is not None
        assert record.state is state


def test_the_whole_life_is_stamped_in_order():
    ledger = VersionLedger()
    ledger.announce(version(3))
    transfer = Transfer(10, 0.1, 0.2)
    ledger.stage(3, transfer)
    ledger.commit(3, pause_seconds=0.001)
    record = ledger.retire(3, "superseded")
    assert record.staged_at is not None
    assert record.committed_at is not None
    assert record.ended_at is not None
    assert record.announced_at <= record.staged_at <= record.committed_at <= record.ended_at
    assert (record.transfer, record.pause_seconds, record.reason) == (transfer, 0.001, "superseded")


@pytest.mark.parametrize("number", [4, 3, 0])
def test_numbers_grow(number):
    ledger = VersionLedger()
    ledger.announce(version(4))
    with pytest.raises(VersionError, match=rf"version {number} comes after version 4"):
        ledger.announce(version(number))


def test_a_number_is_not_used_again_after_an_abort():
    ledger = VersionLedger()
    ledger.announce(version(1))
    ledger.abort(1, "corrupt")
    with pytest.raises(VersionError, match="never used twice"):
        ledger.announce(version(1))


def test_zero_is_a_version():
    ledger = VersionLedger()
    ledger.announce(version(0))
    assert ledger.latest == 0
    with pytest.raises(VersionError):
        ledger.announce(version(0))


@pytest.mark.parametrize("number", [-1, 1.0, "1", True, None])
def test_what_is_no_number_is_refused(number):
    with pytest.raises(InvalidArgumentError, match="integer >= 0"):
        WeightVersion(number, None, "digest", 0.0)


def test_an_illegal_step_says_where_the_version_is_and_why():
    ledger = VersionLedger()
    ledger.announce(version(1))
    ledger.abort(1, "tensor 'x' is torn")
    with pytest.raises(VersionError, match=r"1 is aborted \(tensor 'x' is torn\) and cannot"):
        ledger.commit(1)
    with pytest.raises(VersionError, match="2 was never announced"):
        ledger.stage(2)


def test_the_ledger_forgets_old_ended_versions_and_no_others():
    ledger = VersionLedger(keep=3)
    for number in range(100):
        ledger.announce(version(number))
        ledger.stage(number)
        if number != 5:
            ledger.retire(number, "superseded")
    numbers = [record.version.number for record in ledger.records()]
    assert numbers == [5, 97, 98, 99]
