import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.correction import group_advantage, informative_groups
from consistency.errors import InvalidInputError

REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0])
ONE_GROUP = torch.zeros(5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("grpo", [1.095443, -0.730295, -0.730295, 1.095443, -0.730295]),
        ("dr_grpo", [0.6, -0.4, -0.4, 0.6, -0.4]),
        ("rloo", [0.75, -0.5, -0.5, 0.75, -0.5]),
    ],
)
def test_worked_example(kind, expected):
    found = group_advantage(REWARDS, ONE_GROUP, kind)
    # The 1e-6 beside the std moves the last digit of the published numbers.
    assert torch.allclose(found, torch.tensor(expected), atol=3e-6)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("value", [0.1, 1.0, 0.3])
def test_a_constant_group_gives_exactly_zero(kind, value):
    rewards = torch.full((7,), value)
    found = group_advantage(rewards, torch.full((7,), 3), kind)
    assert torch.equal(found, torch.zeros(7))


def test_a_group_of_one_has_no_baseline():
    rewards, groups = torch.tensor([2.0]), torch.tensor([9])
    assert group_advantage(rewards, groups, "grpo").item() == pytest.approx(2.0 / (1 + 1e-6))
    assert group_advantage(rewards, groups, "rloo").item() == 2.0
    assert group_advantage(rewards, groups, "dr_grpo").item() == 2.0


def test_groups_may_be_interleaved_and_of_different_sizes():
    groups = torch.tensor([7, -2, 7, -2, 7])
    found = group_advantage(REWARDS, groups, "dr_grpo")
    assert torch.allclose(found, torch.tensor([2 / 3, -0.5, -1 / 3, 0.5, -1 / 3]))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(-5, 5, width=32)), min_size=1, max_size=20),
    st.randoms(use_true_random=False),
)
def test_the_order_of_the_responses_does_not_matter(pairs, random):
    order = list(range(len(pairs)))
    random.shuffle(order)
    groups = torch.tensor([group for group, _ in pairs])
    rewards = torch.tensor([reward for _, reward in pairs])
    for kind in ("grpo", "dr_grpo", "rloo"):
        direct = group_advantage(rewards, groups, kind)
        shuffled = group_advantage(rewards[order], groups[order], kind)
        assert torch.allclose(direct[order], shuffled, atol=1e-5)


def test_no_responses_give_no_advantages():
    empty = group_advantage(torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    assert empty.shape == (0,)


@pytest.mark.parametrize(
    ("rewards", "groups", "message"),
    [
        (torch.tensor([1.0, float("nan")]), torch.tensor([0, 0]), r"rewards\[1\]"),
        (torch.tensor([1, 0]), torch.tensor([0, 0]), "rewards"),
        (torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.0]), "groups"),
        (torch.tensor([1.0, 0.0]), torch.tensor([0]), "groups"),
    ],
)
def test_bad_rewards_or_groups_raise(rewards, groups, message):
    with pytest.raises(InvalidInputError, match=message):
        group_advantage(rewards, groups)


def test_an_unknown_kind_raises():
    with pytest.raises(InvalidInputError, match="'grpo', 'dr_grpo' or 'rloo'"):
        group_advantage(REWARDS, ONE_GROUP, "ppo")  # type: ignore[arg-type]


def test_worked_example_of_dynamic_sampling():
    metric = torch.tensor([1.0] * 4 + [1, 0, 1, 0] + [0.0] * 4 + [0.2] * 4)
    groups = torch.arange(4).repeat_interleave(4)
    assert informative_groups(metric, groups).tolist() == [False] * 4 + [True] * 4 + [False] * 8
