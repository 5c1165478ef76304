import pytest
import torch

from consistency.correction import (
    CORRECTIONS,
    Correction,
    icepop,
    make_correction,
    sequence_tis,
    token_tis,
)
from consistency.errors import InvalidInputError

OLD = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -0.1, 0.0]])
ROLL = torch.tensor([[-1.5, -2.0, -1.0], [-0.4, -2.9, 0.0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


def same(left, right):
    return torch.equal(left.weight, right.weight) and torch.equal(left.mask, right.mask)


def test_a_rule_is_the_function_of_its_name():
    assert same(make_correction("token_tis")(OLD, ROLL, MASK), token_tis(OLD, ROLL, MASK))
    assert same(
        make_correction("sequence_tis", limit=3.0)(OLD, ROLL, MASK),
        sequence_tis(OLD, ROLL, MASK, limit=3.0),
    )
    assert same(
        make_correction("icepop", low=0.4, high=4.0)(OLD, ROLL, MASK),
        icepop(OLD, ROLL, MASK, low=0.4, high=4.0),
    )


def test_no_correction_weighs_every_token_of_the_mask_with_one():
    found = make_correction("none")(OLD, ROLL, MASK)
    assert torch.equal(found.weight, MASK.float())
    assert torch.equal(found.mask, MASK.bool())
    assert found.masked_fraction == 0.0


def test_no_correction_still_refuses_a_missing_logprob():
    roll = ROLL.clone()
    roll[0, 0] = float("nan")
    with pytest.raises(InvalidInputError, match="lp_roll"):
        make_correction("none")(OLD, roll, MASK)


@pytest.mark.parametrize("name", [name for name in CORRECTIONS if name != "divergence_mask"])
def test_every_rule_works_with_its_defaults_on_packed_tokens(name):
    bounds = torch.tensor([0, 3, 5])
    packed_old, packed_roll = OLD[MASK.bool()], ROLL[MASK.bool()]
    found = make_correction(name)(packed_old, packed_roll, cu_seqlens=bounds)
    padded = make_correction(name)(OLD, ROLL, MASK)
    assert torch.equal(found.weight, padded.weight[MASK.bool()])


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(InvalidInputError, match=r"none, token_tis, .*icepop"):
        make_correction("tis")


@pytest.mark.parametrize(
    ("name", "limits", "message"),
    [
        ("token_tis", {"low": 0.5}, "has no limit 'low': it takes limit, normalise"),
        ("none", {"limit": 2.0}, "it takes none"),
        ("token_tis", {"limit": -1.0}, "limit is -1.0"),
        ("icepop", {"low": 3.0, "high": 2.0}, "low is 3.0"),
        ("divergence_mask", {}, "needs the limit 'limit'"),
        ("token_tis", {"cu_seqlens": None}, "has no limit 'cu_seqlens'"),
    ],
)
def test_bad_limits_fail_when_the_rule_is_made(name, limits, message):
    with pytest.raises(InvalidInputError, match=message):
        make_correction(name, **limits)


def test_rules_compare_by_name_and_limits():
    assert make_correction("icepop", low=0.4) == make_correction("icepop", low=0.4)
    assert make_correction("icepop", low=0.4) != make_correction("icepop")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weight": torch.ones(1, 2, requires_grad=True)}, "detach"),
        ({"mask": torch.tensor([[True, False]])}, "not 0"),
        ({"mask": torch.ones(1, 2)}, "bool"),
        ({"loss_tokens": 1}, "loss_tokens"),
        ({"truncated_tokens": 3}, "truncates"),
    ],
)
def test_a_correction_that_contradicts_itself_raises(fields, message):
    base = {
        "weight": torch.ones(1, 2),
        "mask": torch.ones(1, 2, dtype=torch.bool),
        "loss_tokens": 2,
    }
    with pytest.raises(InvalidInputError, match=message):
        Correction(**{**base, **fields})
