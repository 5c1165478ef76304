from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.kernels import embedding


@settings(max_examples=25, deadline=None)
@given(
    ids=st.lists(st.integers(0, 6), max_size=40),
    width=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 10**6),
)
def test_rows_are_copied_and_gradients_added_in_order_of_position(wide, ids, width, dtype, seed):
    weight = wide(seed, 7, width, dtype=dtype).requires_grad_()
    grad = wide(seed + 1, len(ids), width, dtype=dtype)
    y = embedding(torch.tensor(ids, dtype=torch.int64), weight)
    assert torch.equal(y, weight[ids])
    y.backward(grad)
    expected = torch.zeros(7, width)
    for position, row in enumerate(ids):
        expected[row] += grad[position].float()
    assert torch.equal(weight.grad, expected.to(dtype))


def test_main_grad_receives_each_row_in_one_addition(wide, threads):
    ids = torch.randint(0, 50, (20, 30), generator=torch.Generator().manual_seed(0))
    weight, grad = wide(0, 60, 64).requires_grad_(), wide(1, 20, 30, 64)
    plain = wide(0, 60, 64).requires_grad_()
    embedding(ids, plain).backward(grad)
    before = wide(2, 60, 64)
    for count in (1, 2):
        weight.main_grad = before.clone()
        with threads(count):
            embedding(ids.int(), weight).backward(grad.transpose(0, 1).contiguous().transpose(0, 1))
        assert weight.grad is None
        assert torch.equal(weight.main_grad, before + plain.grad)


def test_bad_arguments_are_refused():
    weight = torch.zeros(4, 3)
    for ids in ([4], [-1], list(range(100))):
        with pytest.raises(InvalidInputError, match=r"ids must lie in \[0, 4\)"):
            embedding(torch.tensor(ids), weight)
    with pytest.raises(UnsupportedError, match="ids must be int64 or int32"):
        embedding(torch.tensor([0.0]), weight)
    with pytest.raises(UnsupportedError, match="weight has dtype"):
        embedding(torch.tensor([0]), weight.double())
    with pytest.raises(InvalidInputError, match="weight must have 2 dimensions"):
        embedding(torch.tensor([0]), weight[0])
