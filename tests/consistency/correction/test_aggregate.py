from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.correction import LossCounts, aggregate
from consistency.errors import InvalidInputError

LOSS = torch.tensor([[1.0, 1, 1, 1], [2, 2, 9, 9]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def norm_for(mode: str, value: float = 8.0) -> dict[str, Any]:
    return {"norm": value} if mode == "seq-mean-token-sum-norm" else {}


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 1.333333),
        ("seq-mean-token-mean", 1.5),
        ("seq-mean-token-sum", 4.0),
        ("seq-mean-token-sum-norm", 1.0),
    ],
)
def test_worked_example(mode, expected):
    found = aggregate(LOSS, MASK, mode, **norm_for(mode))
    assert found.item() == pytest.approx(expected, abs=1e-6)
    assert found.dtype == torch.float32


@pytest.mark.parametrize("mode", MODES)
def test_a_packed_batch_gives_the_loss_of_the_padded_one(mode):
    packed = torch.cat([LOSS[0], LOSS[1, :2]])
    found = aggregate(
        packed,
        torch.ones(6),
        mode,
        cu_seqlens=torch.tensor([0, 4, 6], dtype=torch.int32),
        **norm_for(mode),
    )
    assert torch.equal(found, aggregate(LOSS, MASK, mode, **norm_for(mode)))


def test_fully_masked_sequences_do_not_enter_a_mean_over_sequences():
    loss = torch.cat([LOSS, torch.full((1, 4), 7.0)])
    mask = torch.cat([MASK, torch.zeros(1, 4, dtype=torch.int64)])
    for mode in MODES:
        assert torch.equal(
            aggregate(loss, mask, mode, **norm_for(mode)),
            aggregate(LOSS, MASK, mode, **norm_for(mode)),
        )


def test_rejected_tokens_stay_in_the_denominator_unless_told_otherwise():
    kept = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0]])
    assert aggregate(LOSS, MASK, kept=kept).item() == pytest.approx(6 / 6)
    assert aggregate(LOSS, MASK, kept=kept, denominator="kept").item() == pytest.approx(6 / 4)
    by_sequence = aggregate(LOSS, MASK, "seq-mean-token-mean", kept=kept)
    assert by_sequence.item() == pytest.approx((2 / 4 + 4 / 2) / 2)


def test_a_batch_without_tokens_gives_zero_that_still_reaches_the_graph():
    for mode in MODES:
        loss = LOSS.clone().requires_grad_()
        value = aggregate(loss, torch.zeros(2, 4), mode, **norm_for(mode))
        value.backward()
        assert value.item() == 0.0
        assert loss.grad is not None and torch.equal(loss.grad, torch.zeros_like(LOSS))


def test_what_the_mask_hides_may_be_nan():
    loss = LOSS.clone()
    loss[1, 2] = float("nan")
    loss.requires_grad_()
    value = aggregate(loss, MASK)
    value.backward()
    assert value.item() == pytest.approx(4 / 3, abs=1e-6)
    assert loss.grad is not None and torch.isfinite(loss.grad).all()


batches = st.lists(
    st.lists(st.tuples(st.floats(-4, 4, width=32), st.booleans()), min_size=5, max_size=5),
    min_size=1,
    max_size=8,
)


@settings(max_examples=30, deadline=None)
@given(batches, st.integers(1, 4), st.sampled_from(MODES))
def test_the_loss_does_not_depend_on_micro_batching(rows, size, mode):
    loss = torch.tensor([[value for value, _ in row] for row in rows])
    mask = torch.tensor([[flag for _, flag in row] for row in rows])
    whole = loss.clone().requires_grad_()
    expected = aggregate(whole, mask, mode, **norm_for(mode))
    expected.backward()

    split = loss.clone().requires_grad_()
    pieces = [slice(start, start + size) for start in range(0, len(rows), size)]
    counts = LossCounts(0, 0)
    for piece in pieces:
        counts = counts + LossCounts.of(mask[piece])
    total = torch.zeros(())
    for piece in pieces:
        part = aggregate(split[piece], mask[piece], mode, counts=counts, **norm_for(mode))
        part.backward()
        total = total + part.detach()
    assert torch.allclose(total, expected.detach(), atol=1e-5)
    assert whole.grad is not None and split.grad is not None
    assert torch.allclose(split.grad, whole.grad, atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(batches, st.integers(0, 6), st.sampled_from(MODES))
def test_padding_columns_change_no_bit_of_the_loss(rows, padding, mode):
    loss = torch.tensor([[value for value, _ in row] for row in rows])
    mask = torch.tensor([[flag for _, flag in row] for row in rows])
    filler = torch.full((len(rows), padding), 3.0)
    padded = aggregate(
        torch.cat([loss, filler], 1),
        torch.cat([mask, filler < 0], 1),
        mode,
        **norm_for(mode),
    )
    assert torch.equal(padded, aggregate(loss, mask, mode, **norm_for(mode)))


def test_averaging_over_ranks_is_undone_by_scale():
    ranks = [(LOSS[:1], MASK[:1]), (LOSS[1:], MASK[1:])]
    counts = LossCounts.of(MASK)
    losses = [aggregate(loss, mask, counts=counts, scale=2.0) for loss, mask in ranks]
    assert torch.stack(losses).mean().item() == pytest.approx(4 / 3, abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "mean"}, "token-mean"),
        ({"mode": "seq-mean-token-sum-norm"}, "norm"),
        ({"norm": 4.0}, "norm"),
        ({"denominator": "valid"}, "denominator"),
        ({"counts": LossCounts(5, 2)}, "micro-batch"),
        ({"kept": torch.ones(2, 4)}, "kept"),
        ({"mask": MASK[:1]}, "mask"),
    ],
)
def test_arguments_that_do_not_fit_raise(arguments, message):
    with pytest.raises(InvalidInputError, match=message):
        aggregate(**{"loss": LOSS, "mask": MASK, **arguments})


def test_counts_that_cannot_be_raise():
    with pytest.raises(InvalidInputError, match="counts"):
        LossCounts(1, 2)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)])
def test_a_batch_without_any_token_at_all_gives_zero(shape):
    loss = torch.zeros(shape, requires_grad=True)
    for mode in MODES:
        value = aggregate(loss, torch.zeros(shape), mode, **norm_for(mode))
        value.backward()
        assert value.item() == 0.0


def test_packed_batches_may_hold_empty_sequences_and_none():
    bounds = torch.tensor([0, 0, 4, 4], dtype=torch.int32)
    found = aggregate(LOSS[0], MASK[0], "seq-mean-token-sum", cu_seqlens=bounds)
    assert found.item() == 4.0
    nothing = torch.zeros(0)
    assert aggregate(nothing, nothing, cu_seqlens=torch.tensor([0])).item() == 0.0
