from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.kernels import top_k


def reference(scores, k):
    ids = [sorted(range(len(row)), key=lambda i: (-row[i], i))[:k] for row in scores.tolist()]
    return torch.tensor(ids, dtype=torch.int64).view(len(ids), k)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(1, 300),
    st.integers(0, 10**6),
    st.integers(1, 50),
    st.data(),
)
def test_ties_go_to_the_lowest_index(rows, width, seed, levels, data):
    k = data.draw(st.integers(0, width))
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-levels, levels, (rows, width), generator=generator).float()
    values, ids = top_k(scores, k)
    assert torch.equal(ids, reference(scores, k))
    assert torch.equal(values, scores.gather(1, ids))
    picked = data.draw(st.lists(st.integers(0, rows - 1), max_size=20))
    assert torch.equal(top_k(scores[picked], k)[1], ids[picked])


@pytest.mark.parametrize("k", [1, 8, 64, 65, 500])
def test_a_wholly_tied_row_selects_the_first_entries_on_any_number_of_threads(threads, k):
    scores = torch.zeros(200, 500)
    for count in (1, 2):
        with threads(count):
            assert torch.equal(top_k(scores, k)[1], torch.arange(k).expand(200, k))


def test_infinities_are_ordered_and_zeros_of_either_sign_are_equal():
    scores = torch.tensor([[0.0, -0.0, float("-inf"), float("inf"), 0.0]])
    assert top_k(scores, 5)[1].tolist() == [[3, 0, 1, 4, 2]]


def test_strided_and_expanded_inputs_give_the_same_ids(wide):
    scores = wide(0, 10, 64)[:, ::2]
    expected = top_k(scores.clone(), 5)[1]
    assert torch.equal(top_k(scores.t().contiguous().t(), 5)[1], expected)
    assert torch.equal(top_k(scores[:1].expand(3, -1), 5)[1], expected[:1].expand(3, -1))


def test_the_gradient_reaches_the_entries_that_were_taken(wide):
    scores = wide(0, 4, 10).requires_grad_()
    values, ids = top_k(scores, 3)
    grad = wide(1, 4, 3)
    (grad_scores,) = torch.autograd.grad(values, scores, grad)
    assert torch.equal(grad_scores, torch.zeros(4, 10).scatter(1, ids, grad))
    assert torch.equal(values.detach(), top_k(scores.detach(), 3)[0])


def test_empty_inputs_work():
    values, ids = top_k(torch.empty(0, 8), 3)
    assert values.shape == ids.shape == (0, 3)
    assert top_k(torch.empty(4, 0), 0)[1].shape == (4, 0)


def test_nan_raises_and_names_the_row():
    scores = torch.zeros(3, 20)
    scores[2, 17] = float("nan")
    with pytest.raises(InvalidInputError, match=r"scores\[2\] holds a NaN"):
        top_k(scores, 2)


def test_bad_arguments_are_named():
    with pytest.raises(InvalidInputError, match=r"k must be from 0 to the 4 entries.*got 5"):
        top_k(torch.zeros(2, 4), 5)
    with pytest.raises(UnsupportedError, match=r"scores must be float32, got torch.bfloat16"):
        top_k(torch.zeros(2, 4, dtype=torch.bfloat16), 1)
