from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.kernels import _gemm, grouped_linear, library, linear

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


def offsets_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0)


def run(function, x, weight, grad):
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = function(x, weight)
    return y.detach(), *torch.autograd.grad(y, (x, weight), grad)


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.one_of(st.just(0), st.integers(0, 30)), min_size=1, max_size=6),
    shape=st.tuples(st.integers(1, 60), st.one_of(st.integers(1, 60), st.sampled_from([256, 512]))),
    dtype=DTYPES,
    tp_invariant=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_each_expert_gives_the_bits_of_its_own_linear(
    wide, counts, shape, dtype, tp_invariant, seed
):
    offsets = offsets_of(counts)
    x = wide(seed, sum(counts), shape[1], dtype=dtype)
    weight = wide(seed + 1, len(counts), *shape, dtype=dtype)
    grad = wide(seed + 2, sum(counts), shape[0], dtype=dtype)
    y, grad_x, grad_weight = run(
        lambda x, w: grouped_linear(x, w, offsets, tp_invariant=tp_invariant), x, weight, grad
    )
    for expert in range(len(counts)):
        rows = slice(int(offsets[expert]), int(offsets[expert + 1]))
        alone = run(
            lambda x, w: linear(x, w, tp_invariant=tp_invariant),
            x[rows],
            weight[expert],
            grad[rows],
        )
        assert torch.equal(y[rows], alone[0])
        assert torch.equal(grad_x[rows], alone[1])
        assert torch.equal(grad_weight[expert], alone[2])


def test_main_grad_is_accumulated_and_an_idle_expert_left_alone(wide):
    offsets = offsets_of([5, 0, 9])
    x, grad = wide(0, 14, 40, dtype=torch.bfloat16), wide(1, 14, 12, dtype=torch.bfloat16)
    weight = wide(2, 3, 12, 40, dtype=torch.bfloat16).requires_grad_()
    before = wide(3, 3, 12, 40)
    before[1] = -0.0
    weight.main_grad = before.clone()
    grouped_linear(x, weight, offsets).backward(grad)
    assert weight.grad is None
    for expert, rows in ((0, slice(0, 5)), (2, slice(5, 14))):
        product = linear(grad[rows].t(), x[rows].t(), out_dtype=torch.float32)
        assert torch.equal(weight.main_grad[expert], before[expert] + product)
    assert weight.main_grad[1].signbit().all()


def test_threads_strides_and_instruction_sets_change_no_bit(wide, threads, monkeypatch):
    offsets = offsets_of([1, 40, 0, 3, 20])
    x, weight = wide(0, 64, 200), wide(1, 5, 130, 200)
    with threads(1):
        expected = grouped_linear(x, weight, offsets)
    with threads(2):
        assert torch.equal(grouped_linear(x, weight, offsets), expected)
    strided_offsets = offsets.repeat_interleave(2)[::2]
    swapped = weight.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(grouped_linear(x.t().contiguous().t(), swapped, strided_offsets), expected)
    small = (x[:9, :33], weight[:2, :20, :33], offsets_of([4, 5]))
    reference = grouped_linear(*small)
    for variant in library.runnable_variants():
        with monkeypatch.context() as patch:
            patch.setattr(_gemm, "_grouped_rows", _gemm._grouped_rows.on(variant))
            assert torch.equal(grouped_linear(*small), reference)


def test_no_rows_and_no_experts():
    weight = torch.zeros(3, 4, 5)
    assert grouped_linear(torch.zeros(0, 5), weight, torch.zeros(4, dtype=torch.int64)).shape == (
        0,
        4,
    )
    empty = grouped_linear(torch.zeros(0, 5), weight[:0], torch.zeros(1, dtype=torch.int64))
    assert empty.shape == (0, 4)


def test_bad_arguments_are_refused():
    x, weight, offsets = torch.zeros(6, 5), torch.zeros(2, 4, 5), torch.tensor([0, 2, 6])
    cases = [
        ((torch.zeros(6, 4), weight, offsets), "last dimension of x must be 5"),
        ((x, weight[0], offsets), "weight must have 3 dimensions"),
        ((x, weight, offsets[:2]), r"offsets must have shape \(3,\)"),
        ((x, weight, torch.tensor([0, 2, 5])), "offsets must run from 0 to the 6 rows"),
        ((x, weight, torch.tensor([0, 7, 6])), "offsets must never fall"),
    ]
    for arguments, message in cases:
        with pytest.raises(InvalidInputError, match=message):
            grouped_linear(*arguments)
    with pytest.raises(UnsupportedError, match="offsets must be int64"):
        grouped_linear(x, weight, offsets.int())
    with pytest.raises(UnsupportedError, match="weight has dtype"):
        grouped_linear(x, weight.double(), offsets)
