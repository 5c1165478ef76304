from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.kernels import linear, matmul

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 30),
    columns=st.integers(0, 70),
    width=st.one_of(st.integers(0, 70), st.sampled_from([128, 512])),
    dtypes=st.tuples(DTYPES, DTYPES),
    tp_invariant=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_every_memory_layout_gives_the_bits_of_linear(
    wide, rows, columns, width, dtypes, tp_invariant, seed
):
    a, b = (
        wide(seed, rows, width, dtype=dtypes[0]),
        wide(seed + 1, columns, width, dtype=dtypes[1]).t(),
    )
    expected = linear(a, b.t(), tp_invariant=tp_invariant)
    for left in (a, a.t().contiguous().t(), a.repeat_interleave(2, 1)[:, ::2]):
        for right in (b, b.contiguous(), b.repeat_interleave(2, 0)[::2]):
            assert torch.equal(matmul(left, right, tp_invariant=tp_invariant), expected)


def test_gradients_are_those_of_float64(error):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(20, 30, generator=generator, requires_grad=True)
    b = torch.randn(30, 11, generator=generator, requires_grad=True)
    grad = torch.randn(20, 11, generator=generator)
    exact_a, exact_b = a.detach().double().requires_grad_(), b.detach().double().requires_grad_()
    matmul(a, b).backward(grad)
    (exact_a @ exact_b).backward(grad.double())
    assert error(a.grad, exact_a.grad) < 1e-6
    assert error(b.grad, exact_b.grad) < 1e-6


def test_the_gradients_of_a_slice_are_the_slices_of_the_gradient(wide):
    a, b, grad = wide(0, 20, 40), wide(1, 40, 30), wide(2, 20, 30)
    a.requires_grad_()
    matmul(a, b).backward(grad)
    part = a.detach()[5:9].requires_grad_()
    matmul(part, b).backward(grad[5:9])
    assert torch.equal(part.grad, a.grad[5:9])


def test_bad_operands_are_refused():
    good = torch.zeros(3, 4)
    with pytest.raises(InvalidInputError, match="do not fit"):
        matmul(good, good)
    with pytest.raises(InvalidInputError, match="b must have 2 dimensions"):
        matmul(good, torch.zeros(4))
    with pytest.raises(UnsupportedError, match="a has dtype torch"):
        matmul(good.double(), good.t())
