from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency import kernels
from consistency.errors import InvalidInputError, UnsupportedError
from consistency.kernels import library, reductions

BFLOAT = torch.bfloat16
OPERATIONS = {"sum": (kernels.sum, torch.sum), "mean": (kernels.mean, torch.mean)}


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 30),
    width=st.one_of(st.integers(0, 60), st.sampled_from([1024, 1025, 5000])),
    name=st.sampled_from(sorted(OPERATIONS)),
    dtype=st.sampled_from([torch.float32, BFLOAT, torch.float16]),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_a_row_does_not_depend_on_the_batch(wide, rows, width, name, dtype, seed, data):
    ours, _ = OPERATIONS[name]
    x = wide(seed, rows, width, dtype=dtype)
    whole = ours(x, -1)
    picked = data.draw(st.lists(st.integers(0, rows - 1), max_size=40)) if rows else []
    assert torch.equal(ours(x[picked], -1).isnan(), whole[picked].isnan())
    assert torch.equal(ours(x[picked], -1).nan_to_num(), whole[picked].nan_to_num())
    if width:
        assert torch.equal(ours(x.t(), 0), whole)
        assert torch.equal(ours(x.view(rows, 1, width), (1, 2)), whole)


@pytest.mark.parametrize("name", sorted(OPERATIONS))
@pytest.mark.parametrize("dim", [None, 0, 1, -1, (0, 2), (2, 1), (0, 1, 2), ()])
@pytest.mark.parametrize("keepdim", [False, True])
def test_shapes_values_and_gradients_are_those_of_torch(name, dim, keepdim):
    ours, torchs = OPERATIONS[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, 5, generator=generator, requires_grad=True)
    exact = x.detach().double().requires_grad_()
    y = ours(x, dim, keepdim=keepdim)
    # torch reads an empty tuple as every dimension; the kernels read it as none.
    reference = exact if dim == () else torchs(exact, dim=dim, keepdim=keepdim)
    assert torch.allclose(y.double(), reference, atol=1e-6)
    assert y.shape == reference.shape
    grad = torch.randn(y.shape, generator=generator)
    y.backward(grad)
    reference.backward(grad.double())
    assert x.grad is not None
    assert exact.grad is not None
    assert torch.allclose(x.grad.double(), exact.grad, atol=1e-6)


@pytest.mark.parametrize("width", [100, 5000, 300_000])
@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_the_error_against_float64_is_no_larger_than_torchs(error, name, width):
    ours, torchs = OPERATIONS[name]
    x = torch.randn(40, width, generator=torch.Generator().manual_seed(width))
    exact = torchs(x.double(), dim=-1)
    assert error(ours(x, -1), exact) <= error(torchs(x, dim=-1), exact) * 1.1


def test_a_mean_of_large_float16_numbers_does_not_overflow():
    x = torch.full((3, 5000), 60000.0, dtype=torch.float16)
    assert torch.equal(kernels.mean(x, -1), torch.full((3,), 60000.0, dtype=torch.float16))
    assert kernels.sum(x, -1, out_dtype=torch.float32).isfinite().all()


def test_a_very_wide_row_is_the_same_on_one_and_two_threads(wide, threads):
    x = wide(0, 2, 1 << 20)
    for ours, _ in OPERATIONS.values():
        with threads(1):
            one = ours(x, -1)
        with threads(2):
            assert torch.equal(ours(x, -1), one)
            assert torch.equal(ours(x[1:], -1), one[1:])


def test_sums_and_means_of_nothing():
    assert torch.equal(kernels.sum(torch.empty(2, 0), -1), torch.zeros(2))
    assert kernels.mean(torch.empty(2, 0), -1).isnan().all()
    assert kernels.sum(torch.empty(0, 3)).item() == 0.0
    assert kernels.sum(torch.empty(0, 3), -1).shape == (0,)
    assert kernels.mean(torch.tensor(2.0)).item() == 2.0
    assert kernels.sum(torch.tensor(2.0), 0).item() == 2.0


def test_infinities_and_nan_stay_in_their_row(wide):
    x = wide(0, 5, 40)
    expected = kernels.sum(x, -1)
    x[1, 3], x[2, 0], x[3, 1], x[3, 2] = float("inf"), float("nan"), float("inf"), -float("inf")
    y = kernels.sum(x, -1)
    assert y[1].item() == float("inf")
    assert y[2:4].isnan().all()
    assert torch.equal(y[[0, 4]], expected[[0, 4]])


def test_every_instruction_set_gives_the_same_bits(wide, monkeypatch):
    x, results = wide(0, 5, 3000, dtype=BFLOAT), []
    for variant in library.runnable_variants():
        with monkeypatch.context() as patch:
            patch.setattr(reductions, "_row_sums", reductions._row_sums.on(variant))
            results.append((kernels.sum(x, -1, out_dtype=torch.float32), kernels.mean(x)))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_what_does_not_fit_is_refused():
    x = torch.zeros(2, 3)
    with pytest.raises(InvalidInputError, match="dim 2 does not exist"):
        kernels.sum(x, 2)
    with pytest.raises(InvalidInputError, match="each dimension once"):
        kernels.mean(x, (0, -2))
    with pytest.raises(UnsupportedError, match="dtype"):
        kernels.sum(x.long())
    with pytest.raises(UnsupportedError, match="out_dtype"):
        kernels.sum(x, out_dtype=torch.float64)
