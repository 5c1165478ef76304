from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.kernels import addmm, bmm, linear, matmul

BFLOAT = torch.bfloat16
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


@settings(max_examples=30, deadline=None)
@given(
    batch=st.integers(0, 4),
    rows=st.integers(0, 20),
    width=st.sampled_from([0, 1, 37, 128, 300]),
    outputs=st.integers(1, 40),
    dtype=DTYPES,
    tp_invariant=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_bmm_is_matmul_of_each_member_with_its_gradients(
    wide, batch, rows, width, outputs, dtype, tp_invariant, seed
):
    a = wide(seed, batch, rows, width, dtype=dtype).requires_grad_()
    b = wide(seed + 1, batch, outputs, width, dtype=dtype).requires_grad_()
    grad = wide(seed + 2, batch, rows, outputs, dtype=dtype)
    whole = bmm(a, b.mT, tp_invariant=tp_invariant)
    gradients = torch.autograd.grad(whole, (a, b), grad)
    for i in range(batch):
        left, right = (t[i].detach().clone().requires_grad_() for t in (a, b))
        one = matmul(left, right.t(), tp_invariant=tp_invariant)
        assert torch.equal(one, whole[i])
        expected = torch.autograd.grad(one, (left, right), grad[i])
        assert torch.equal(expected[0], gradients[0][i])
        assert torch.equal(expected[1], gradients[1][i])


@pytest.mark.parametrize("bias_shape", [(), (1,), (12,), (1, 12), (7, 1), (7, 12)])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (0.5, -2.0), (1.0, 0.0), (0.0, 1.0)])
def test_addmm_takes_every_bias_and_factor(error, bias_shape, alpha, beta):
    generator = torch.Generator().manual_seed(0)
    shapes = (bias_shape, (7, 30), (30, 12))
    leaves = [torch.randn(s, generator=generator).requires_grad_() for s in shapes]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    grad = torch.randn(7, 12, generator=generator)
    y = addmm(*leaves, alpha=alpha, beta=beta)
    reference = torch.addmm(*exact, alpha=alpha, beta=beta)
    assert error(y.detach(), reference.detach()) < 1e-6
    gradients = torch.autograd.grad(y, leaves, grad)
    references = torch.autograd.grad(reference, exact, grad.double())
    for got, want in zip(gradients, references, strict=True):
        assert got.shape == want.shape
        assert error(got, want) < 1e-6


def test_addmm_has_the_bits_of_linear_and_of_its_parts(wide):
    x, weight, bias = wide(0, 9, 300, dtype=BFLOAT), wide(1, 20, 300, dtype=BFLOAT), wide(2, 20)
    expected = linear(x, weight, bias)
    assert torch.equal(addmm(bias, x, weight.t()), expected)
    assert torch.equal(addmm(bias.expand(9, 20), x, weight.t()), expected)
    wide_product = matmul(x, weight.t(), out_dtype=torch.float32)
    scaled = (wide_product * 0.3 + bias * 1.7).to(BFLOAT)
    assert torch.equal(addmm(bias, x, weight.t(), alpha=0.3, beta=1.7), scaled)
    assert torch.equal(addmm(bias, x[2:4], weight.t(), alpha=0.3, beta=1.7), scaled[2:4])


def test_addmm_with_a_beta_of_zero_does_not_read_the_bias(wide):
    a, b = wide(0, 3, 4), wide(1, 4, 5)
    nan = torch.full((5,), float("nan"))
    assert torch.equal(addmm(nan, a, b, beta=0.0), matmul(a, b))


def test_bmm_and_addmm_refuse_what_does_not_fit():
    a, b = torch.zeros(2, 3, 4), torch.zeros(2, 4, 5)
    with pytest.raises(InvalidInputError, match="b must have shape"):
        bmm(a, b[:1])
    with pytest.raises(UnsupportedError, match="dtype"):
        bmm(a.double(), b.double())
    with pytest.raises(InvalidInputError, match="does not broadcast"):
        addmm(torch.zeros(4), a[0], b[0])
    with pytest.raises(InvalidInputError, match="do not fit"):
        addmm(torch.zeros(4), a[0], a[0])
