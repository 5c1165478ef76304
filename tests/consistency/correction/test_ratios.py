import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.correction import gspo_token_ratio, sequence_ratio, token_ratio
from consistency.errors import InvalidInputError


def log(values):
    return torch.tensor(values, dtype=torch.float64).log()


NEW = log([[0.5, 0.2, 0.1], [0.3, 0.4, 1.0]])
OLD = log([[0.4, 0.25, 0.1], [0.6, 0.4, 1.0]])
ROLL = log([[0.5, 0.25, 0.05], [0.6, 0.1, 1.0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


def close(found, expected):
    return torch.allclose(found, torch.tensor(expected, dtype=found.dtype), atol=1e-6)


def test_worked_example_of_the_importance_ratios():
    assert close(token_ratio(NEW, OLD, MASK), [[1.25, 0.8, 1], [0.5, 1, 1]])
    assert close(sequence_ratio(NEW, OLD, MASK), [1.0, 0.5])
    assert close(sequence_ratio(NEW, OLD, MASK, kind="geometric"), [1.0, 0.707107])
    assert close(token_ratio(OLD, ROLL, MASK), [[0.8, 1, 2], [1, 4, 1]])
    assert close(token_ratio(NEW, ROLL, MASK), [[1, 0.8, 2], [0.5, 4, 1]])
    assert close(sequence_ratio(OLD, ROLL, MASK), [1.6, 4.0])
    assert close(sequence_ratio(OLD, ROLL, MASK, kind="geometric"), [1.169607, 2.0])


def test_the_gspo_token_ratio_has_the_value_of_its_sequence_and_the_gradient_of_its_token():
    lp = NEW.clone().requires_grad_()
    ratio = gspo_token_ratio(lp, OLD, MASK)
    assert close(ratio.detach(), [[1.0] * 3, [0.707107, 0.707107, 1.0]])
    ratio[1, 0].backward()
    assert lp.grad is not None
    assert close(lp.grad, [[0.0] * 3, [0.707107, 0.0, 0.0]])


def test_a_token_constant_advantage_gives_both_gspo_forms_the_same_gradient():
    by_token = NEW.clone().requires_grad_()
    by_sequence = NEW.clone().requires_grad_()
    ratio = gspo_token_ratio(by_token, OLD, MASK)
    (ratio * MASK).sum(1).div(MASK.sum(1)).sum().backward()
    sequence_ratio(by_sequence, OLD, MASK, kind="geometric").sum().backward()
    assert by_token.grad is not None and by_sequence.grad is not None
    assert torch.allclose(by_token.grad, by_sequence.grad)


def test_a_sequence_without_tokens_has_ratio_one():
    mask = torch.tensor([[1, 1, 1], [0, 0, 0]])
    assert close(sequence_ratio(NEW, OLD, mask, kind="geometric"), [1.0, 1.0])
    assert close(sequence_ratio(NEW, OLD, mask), [1.0, 1.0])


def test_long_sequences_do_not_overflow():
    lp = torch.full((1, 4096), -0.1)
    ratio = sequence_ratio(lp, lp - 1.0)
    assert torch.isfinite(ratio).all()
    assert token_ratio(torch.tensor([0.0]), torch.tensor([-500.0])).isfinite().all()


def test_packed_sequences_give_the_ratios_of_padded_ones():
    bounds = torch.tensor([0, 3, 5])
    packed = (torch.cat([NEW[0], NEW[1, :2]]), torch.cat([OLD[0], OLD[1, :2]]))
    for kind in ("product", "geometric"):
        assert torch.equal(
            sequence_ratio(*packed, kind=kind, cu_seqlens=bounds),
            sequence_ratio(NEW, OLD, MASK, kind=kind),
        )


def test_a_missing_logprob_outside_the_mask_does_not_poison_the_gradient():
    lp = NEW.clone()
    lp[1, 2] = float("-inf")
    lp.requires_grad_()
    token_ratio(lp, OLD, MASK).sum().backward()
    assert lp.grad is not None and torch.isfinite(lp.grad).all()
    assert lp.grad[1, 2] == 0


def test_an_unknown_kind_raises():
    with pytest.raises(InvalidInputError, match="kind"):
        sequence_ratio(NEW, OLD, kind="mean")  # type: ignore[arg-type]


triples = st.lists(st.tuples(*[st.floats(-9.0, 0.0, width=32)] * 3), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None)
@given(triples)
def test_mismatch_times_staleness_is_the_full_ratio(values):
    lp, old, roll = torch.tensor(values, dtype=torch.float64).unbind(1)
    product = token_ratio(old, roll) * token_ratio(lp, old)
    assert torch.allclose(product, token_ratio(lp, roll), rtol=1e-12)
