from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from integrations.errors import BufferStateError
from integrations.trainer.buffer import AdmissionRule, TrajectoryBuffer
from integrations.trainer.trajectory import Trajectory


def sample(prompt: int, index: int, version: int = 0) -> Trajectory:
    return Trajectory(
        request_id=f"{prompt}/{index}",
        prompt_index=prompt,
        sample_index=index,
        token_ids=(1, 2),
        prompt_length=1,
        logprobs=(-0.5,),
        versions=(version,),
        loss_mask=(0, 1),
        temperature=1.0,
        contract_digest="0" * 16,
        finish_reason="stop",
        reward=1.0,
    )


# ---------------------------------------------------------------- admission


@pytest.mark.parametrize(
    ("version", "eta", "batch", "accepted", "running", "concurrent", "capacity"),
    [
        (0, 0, 4, 0, 0, 16, 4),
        (0, 0, 4, 4, 0, 16, 0),
        (2, 4, 8, 40, 10, 64, 6),
        (2, 4, 8, 40, 10, 12, 2),
        (2, 1, 4, 14, 2, 8, 0),
        (0, 0, 4, 3, 5, 16, -4),
    ],
)
def test_capacity_is_the_published_formula(
    version: int, eta: int, batch: int, accepted: int, running: int, concurrent: int, capacity: int
) -> None:
    rule = AdmissionRule(max_staleness=eta, groups_per_step=batch, max_concurrent=concurrent)
    assert rule.capacity(version=version, accepted=accepted, running=running) == capacity


def test_the_rule_admits_exactly_the_requests_that_the_paper_admits() -> None:
    """The paper: request number N may be made only if floor((N - 1) / B) <= version + eta."""
    version, eta, batch = 2, 4, 8
    rule = AdmissionRule(max_staleness=eta, groups_per_step=batch, max_concurrent=10**6)
    admitted = rule.capacity(version=version, accepted=0, running=0)
    assert admitted == 56
    assert (admitted - 1) // batch <= version + eta < admitted // batch


counts = st.integers(0, 50)


@given(counts, counts, st.integers(1, 20), counts, counts)
def test_one_version_more_of_staleness_admits_one_batch_more(
    version: int, eta: int, batch: int, accepted: int, running: int
) -> None:
    def capacity(staleness: int) -> int:
        rule = AdmissionRule(max_staleness=staleness, groups_per_step=batch, max_concurrent=10**9)
        return rule.capacity(version=version, accepted=accepted, running=running)

    assert capacity(eta + 1) == capacity(eta) + batch


@pytest.mark.parametrize("bad", [(-1, 1, 1), (0, 0, 1), (0, 1, 0)])
def test_an_impossible_rule_is_refused(bad: tuple[int, int, int]) -> None:
    with pytest.raises(BufferStateError, match="max_staleness must be >= 0, the other two >= 1"):
        AdmissionRule(*bad)


@settings(max_examples=60, deadline=None)
@given(
    eta=st.integers(0, 4),
    batch=st.integers(1, 4),
    concurrent=st.integers(1, 24),
    lag=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_no_token_is_ever_staler_than_the_bound(
    eta: int, batch: int, concurrent: int, lag: int, seed: int
) -> None:
    """A run with stragglers, slow commits and restarts, under the rule and the buffer together.

    Samples take anything from one tick to many, and their tokens carry the version that served
    when they were admitted: the oldest that they can have.
    """
    rng = Random(seed)
    rule = AdmissionRule(max_staleness=eta, groups_per_step=batch, max_concurrent=concurrent)
    buffer = TrajectoryBuffer(group_size=2)
    trained = committed = consumed = next_prompt = 0
    running: dict[int, list[Trajectory]] = {}
    seen: list[int] = []
    worst = 0
    for _ in range(400):
        complete = (2 * consumed + buffer.sample_count) // 2
        capacity = rule.capacity(version=committed, accepted=complete, running=len(running))
        for _ in range(capacity):
            running[next_prompt] = [sample(next_prompt, i, committed) for i in range(2)]
            next_prompt += 1
        for prompt in list(running):
            while running[prompt] and rng.random() < 0.3 / (1 + prompt % 5):
                buffer.add(running[prompt].pop(rng.randrange(len(running[prompt]))))
            if not running[prompt]:
                del running[prompt]
        groups = buffer.take(batch)
        if groups is not None:
            for group in groups:
                seen.append(group.prompt_index)
                assert [s.sample_index for s in group.samples] == [0, 1]
                worst = max(worst, *(trained - v for s in group.samples for v in s.versions))
            trained += 1
            consumed += batch
        committed = max(committed, trained - rng.randrange(lag + 1))
        assert worst <= eta
    assert trained > 0
    assert seen == list(range(consumed))


# ---------------------------------------------------------------- groups


def test_groups_come_out_in_prompt_order_however_samples_come_in() -> None:
    buffer = TrajectoryBuffer(group_size=2)
    for prompt, index in ((2, 1), (1, 0), (2, 0), (0, 1), (1, 1)):
        buffer.add(sample(prompt, index))
    # Two groups are complete, but prompt 0 is not, and nothing may overtake it.
    assert (buffer.complete_groups, buffer.sample_count) == (2, 5)
    assert buffer.take(2) is None
    buffer.add(sample(0, 0))
    groups = buffer.take(2)
    assert groups is not None
    assert [group.prompt_index for group in groups] == [0, 1]
    assert [s.request_id for group in groups for s in group.samples] == ["0/0", "0/1", "1/0", "1/1"]
    assert buffer.take(2) is None
    assert (buffer.complete_groups, buffer.sample_count) == (1, 2)


def test_a_sample_is_counted_once() -> None:
    buffer = TrajectoryBuffer(group_size=1)
    buffer.add(sample(0, 0))
    with pytest.raises(BufferStateError, match="sample 0 of prompt 0 came twice"):
        buffer.add(sample(0, 0))
    assert buffer.take(1) is not None
    with pytest.raises(BufferStateError, match="sample 0 of prompt 0 came twice"):
        buffer.add(sample(0, 0))
    assert (buffer.sample_count, buffer.complete_groups) == (0, 0)


@pytest.mark.parametrize("index", [-1, 2])
def test_a_sample_outside_its_group_is_refused(index: int) -> None:
    with pytest.raises(BufferStateError, match="is not within groups of 2"):
        TrajectoryBuffer(group_size=2).add(sample(0, index))


def test_a_group_has_at_least_one_sample() -> None:
    with pytest.raises(BufferStateError, match="group_size is 0"):
        TrajectoryBuffer(group_size=0)


def test_a_planned_step_is_taken_again_exactly_and_the_order_goes_on_behind_it() -> None:
    buffer = TrajectoryBuffer(group_size=1, next_prompt=4)
    for prompt in (7, 5, 4, 6):
        buffer.add(sample(prompt, 0))
    assert [g.prompt_index for g in buffer.take_prompts((5, 4))] == [5, 4]
    groups = buffer.take(2)
    assert groups is not None and [g.prompt_index for g in groups] == [6, 7]


def test_a_planned_step_whose_samples_are_gone_is_an_error_and_takes_nothing() -> None:
    buffer = TrajectoryBuffer(group_size=2)
    for record in (sample(0, 0), sample(0, 1), sample(1, 0)):
        buffer.add(record)
    with pytest.raises(BufferStateError, match="prompt 1 was planned for a step but is not"):
        buffer.take_prompts((0, 1))
    assert buffer.sample_count == 3
