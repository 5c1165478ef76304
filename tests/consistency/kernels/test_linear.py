from __future__ import annotations

import functools
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.kernels import _gemm, join_partials, library, linear, row_parallel_partial

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
BFLOAT = torch.bfloat16


def run(x, weight, grad, **options):
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = linear(x, weight, **options)
    return y.detach(), *torch.autograd.grad(y, (x, weight), grad)


def rounded(value: Fraction) -> Fraction:
    return Fraction(torch.tensor(float(value), dtype=torch.float64).float().item())


def by_hand(x, weight, bias, chunks):
    """One element by the order that the documentation states, in exact arithmetic plus rounding."""
    partials = []
    for part_x, part_w in zip(x.chunk(chunks), weight.chunk(chunks), strict=True):
        blocks = []
        for block_x, block_w in zip(part_x.split(256), part_w.split(256), strict=True):
            chains = []
            for chain_x, chain_w in zip(block_x.split(64), block_w.split(64), strict=True):
                chain = Fraction(0)
                for a, b in zip(chain_x.tolist(), chain_w.tolist(), strict=True):
                    chain = rounded(Fraction(a) * Fraction(b) + chain)
                chains.append(chain)
            blocks.append(functools.reduce(lambda a, b: rounded(a + b), chains))
        partials.append(functools.reduce(lambda a, b: rounded(a + b), blocks))
    while len(partials) > 1:
        partials = [rounded(a + b) for a, b in zip(partials[::2], partials[1::2], strict=True)]
    return float(rounded(partials[0] + Fraction(bias)))


@pytest.mark.parametrize(("width", "chunks"), [(37, 1), (128, 2), (256, 4), (512, 8), (1001, 1)])
@pytest.mark.parametrize("rows", [1, 9])
def test_the_order_of_reduction_is_the_documented_one(wide, width, chunks, rows):
    x, weight, bias = wide(0, rows, width), wide(1, 17, width), wide(2, 17)
    y = linear(x, weight, bias, tp_invariant=True)
    for row, column in ((0, 0), (rows - 1, 16), (rows // 2, 8)):
        expected = by_hand(x[row], weight[column], bias[column].item(), chunks)
        assert y[row, column].item() == expected


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 40),
    outputs=st.integers(1, 90),
    width=st.one_of(st.integers(1, 70), st.sampled_from([128, 257, 513, 1024])),
    dtypes=st.tuples(DTYPES, DTYPES),
    tp_invariant=st.booleans(),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_a_row_and_its_gradient_do_not_depend_on_the_batch(
    wide, rows, outputs, width, dtypes, tp_invariant, seed, data
):
    x, weight = (
        wide(seed, rows, width, dtype=dtypes[0]),
        wide(seed + 1, outputs, width, dtype=dtypes[1]),
    )
    grad = wide(seed + 2, rows, outputs, dtype=dtypes[0])
    y, grad_x, _ = run(x, weight, grad, tp_invariant=tp_invariant)
    picked = data.draw(st.lists(st.integers(0, rows - 1), max_size=50)) if rows else []
    part, grad_part, _ = run(x[picked], weight, grad[picked], tp_invariant=tp_invariant)
    assert torch.equal(part, y[picked])
    assert torch.equal(grad_part, grad_x[picked])


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 20), st.integers(2, 120), st.integers(1, 300), st.integers(0, 10**6), st.data()
)
def test_merging_weights_along_n_changes_no_bit(wide, rows, outputs, width, seed, data):
    x, weight = wide(seed, rows, width, dtype=BFLOAT), wide(seed + 1, outputs, width, dtype=BFLOAT)
    cut = data.draw(st.integers(1, outputs - 1))
    split = torch.cat([linear(x, weight[:cut]), linear(x, weight[cut:])], dim=1)
    assert torch.equal(split, linear(x, weight))


def test_a_decode_step_of_a_real_head_equals_its_prefill(wide):
    x, weight = wide(0, 16, 576, dtype=BFLOAT), wide(1, 49152, 576, dtype=BFLOAT)
    whole = linear(x, weight, out_dtype=torch.float32)
    for rows in (slice(3, 4), slice(0, 2), slice(7, 12), slice(5, 14)):
        assert torch.equal(linear(x[rows], weight, out_dtype=torch.float32), whole[rows])


def test_padding_rows_change_no_bit_of_the_others(wide):
    x, weight = wide(0, 70, 576), wide(1, 200, 576)
    whole = linear(x, weight)
    for rows in (1, 8, 9, 63, 64, 65):
        padded = torch.cat([x[:rows], torch.zeros(5, 576)])
        assert torch.equal(linear(padded, weight)[:rows], whole[:rows])


def test_one_thread_equals_two(wide, threads):
    for rows, outputs, width in ((1, 4000, 300), (5, 1000, 515), (200, 300, 300)):
        x, weight, grad = wide(0, rows, width), wide(1, outputs, width), wide(2, rows, outputs)
        with threads(1):
            one = run(x, weight, grad, tp_invariant=True)
        with threads(2):
            two = run(x, weight, grad, tp_invariant=True)
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("rows", [3, 20])
@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT, torch.float16])
def test_strided_expanded_and_transposed_operands_give_the_same_bits(wide, rows, dtype):
    x, weight = wide(0, rows, 130, dtype=dtype), wide(1, 50, 130, dtype=dtype)
    bias, grad = wide(2, 50, dtype=dtype), wide(3, rows, 50, dtype=dtype)
    expected = linear(x, weight, bias)
    strided = wide(4, rows, 260, dtype=dtype)
    strided[:, ::2] = x
    transposed = x.t().contiguous().t()
    weight_transposed = weight.t().contiguous().t()
    every_other = weight.repeat_interleave(2, 1)[:, ::2]
    wide_bias = bias.repeat_interleave(3)[::3]
    for left in (x, strided[:, ::2], transposed):
        for right in (weight, weight_transposed, every_other):
            assert torch.equal(linear(left, right, wide_bias), expected)
    assert torch.equal(linear(x[:1].expand(7, -1), weight, bias), expected[:1].expand(7, -1))
    assert torch.equal(linear(x.view(1, rows, 130), weight, bias), expected.view(1, rows, 50))
    plain = run(x, weight, grad)
    for got, want in zip(
        run(transposed, weight_transposed, grad.t().contiguous().t()), plain, strict=True
    ):
        assert torch.equal(got, want)
    ones = torch.ones(1, 1, dtype=dtype).expand(rows, 50)
    for got, want in zip(run(x, weight, ones), run(x, weight, ones.contiguous()), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("rows", [6, 13])
def test_nan_and_infinity_stay_in_their_row_and_column(wide, rows):
    x, weight = wide(0, rows, 100), wide(1, 35, 100)
    expected = linear(x, weight)
    dirty = x.clone()
    dirty[0], dirty[2, 5], dirty[rows - 1] = float("nan"), float("inf"), -float("inf")
    clean = [row for row in range(rows) if row not in (0, 2, rows - 1)]
    y = linear(dirty, weight)
    assert torch.equal(y[clean], expected[clean])
    assert y[0].isnan().all()
    assert y[2].isinf().all()
    poisoned = weight.clone()
    poisoned[34, 0] = float("nan")
    assert torch.equal(linear(x, poisoned)[:, :34], expected[:, :34])
    assert linear(x, poisoned)[:, 34].isnan().all()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_row_parallel_ranks_agree_with_the_whole(wide, ranks):
    width, rows = 1024, 5
    x, weight = wide(0, rows, width, dtype=BFLOAT), wide(1, 70, width, dtype=BFLOAT)
    bias, grad = wide(2, 70, dtype=BFLOAT), wide(3, rows, 70)
    whole, grad_x, grad_weight = run(x, weight, grad, out_dtype=torch.float32, tp_invariant=True)
    partials, grads_x, grads_weight = [], [], []
    for part_x, part_w in zip(x.chunk(ranks, 1), weight.chunk(ranks, 1), strict=True):
        part_x, part_w = part_x.detach().requires_grad_(), part_w.detach().requires_grad_()
        partial = row_parallel_partial(part_x, part_w, chunks=8 // ranks)
        partial.backward(grad)
        partials.append(partial.detach())
        grads_x.append(part_x.grad)
        grads_weight.append(part_w.grad)
    assert torch.equal(join_partials(partials), whole)
    rounded_whole = linear(x, weight, bias, tp_invariant=True)
    assert torch.equal(join_partials(partials, bias, out_dtype=BFLOAT), rounded_whole)
    assert torch.equal(torch.cat(grads_x, 1), grad_x)
    assert torch.equal(torch.cat(grads_weight, 1), grad_weight)


@pytest.mark.parametrize("width", [576, 1536, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT])
def test_the_error_is_no_larger_than_that_of_torch(dtype, width):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, width, generator=generator).to(dtype)
    weight = (torch.randn(300, width, generator=generator) / 40).to(dtype)
    exact = x.double() @ weight.double().t()
    ours = (linear(x, weight).double() - exact).square().mean().sqrt()
    torchs = (torch.nn.functional.linear(x, weight).double() - exact).square().mean().sqrt()
    # In bfloat16 the rounding of the result is all there is.
    assert ours <= torchs * (1.01 if dtype == BFLOAT else 1.0)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 30), st.integers(1, 40), st.integers(1, 90), DTYPES, st.booleans())
def test_gradients_are_those_of_float64(error, rows, outputs, width, dtype, tp_invariant):
    generator = torch.Generator().manual_seed(rows * 10007 + outputs * 101 + width)
    shapes = ((rows, width), (outputs, width), (outputs,))
    tensors = [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    grad = torch.randn(rows, outputs, generator=generator).to(dtype)
    linear(*tensors, tp_invariant=tp_invariant).backward(grad)
    torch.nn.functional.linear(*exact).backward(grad.double())
    # Half a unit in the last place of the dtype, and a few of fp32 for the sums before it.
    bound = torch.finfo(dtype).eps / 2 + 2e-6
    for tensor, reference in zip(tensors, exact, strict=True):
        assert tensor.grad is not None
        assert tensor.grad.dtype == dtype
        assert error(tensor.grad, reference.grad) <= bound


@pytest.mark.parametrize("rows", [1, 30])
def test_the_forward_is_the_same_with_and_without_gradients(wide, rows):
    x, weight = wide(0, rows, 96, dtype=BFLOAT), wide(1, 33, 96, dtype=BFLOAT)
    y, _, _ = run(x, weight, wide(2, rows, 33, dtype=BFLOAT))
    with torch.no_grad():
        assert torch.equal(linear(x.requires_grad_(), weight), y)
    assert torch.equal(linear(x.detach(), weight), y)


def test_main_grad_receives_the_product_in_one_addition(wide):
    x, grad = wide(0, 21, 50, dtype=BFLOAT), wide(1, 21, 18, dtype=BFLOAT)
    weight = wide(2, 18, 50, dtype=BFLOAT).requires_grad_()
    bias = wide(3, 18, dtype=BFLOAT).requires_grad_()
    before, before_bias = wide(4, 18, 50), wide(5, 18)
    weight.main_grad, bias.main_grad = before.clone(), before_bias.clone()
    linear(x, weight, bias).backward(grad)
    assert weight.grad is None
    assert bias.grad is None
    product = linear(grad.t(), x.t(), out_dtype=torch.float32)
    assert torch.equal(weight.main_grad, before + product)
    column_sums = linear(torch.ones(1, 21), grad.t(), out_dtype=torch.float32)[0]
    assert torch.equal(bias.main_grad, before_bias + column_sums)


def test_main_grad_of_a_wrong_kind_is_refused(wide):
    weight = wide(0, 4, 8).requires_grad_()
    for buffer in (torch.zeros(4, 8, dtype=BFLOAT), torch.zeros(8, 4), "zeros"):
        weight.main_grad = buffer
        with pytest.raises(InvalidInputError, match="main_grad"):
            linear(wide(1, 2, 8), weight).sum().backward()


def test_a_weight_changed_before_its_backward_is_noticed(wide):
    x, weight = wide(0, 3, 8).requires_grad_(), wide(1, 4, 8)
    y = linear(x, weight)
    weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_empty_dimensions(wide):
    bias = wide(0, 3)
    assert linear(torch.empty(0, 5), wide(1, 3, 5)).shape == (0, 3)
    assert linear(wide(1, 4, 5), torch.empty(0, 5)).shape == (4, 0)
    for tp_invariant in (False, True):
        y = linear(torch.empty(4, 0), torch.empty(3, 0), bias, tp_invariant=tp_invariant)
        assert torch.equal(y, bias.expand(4, 3))
    assert linear(torch.empty(2, 0, 5), wide(1, 3, 5)).shape == (2, 0, 3)
    x, weight = torch.empty(0, 5, requires_grad=True), wide(1, 3, 5).requires_grad_()
    linear(x, weight).sum().backward()
    assert torch.equal(weight.grad, torch.zeros(3, 5))
    weight.main_grad = torch.full((3, 5), -0.0)
    linear(x, weight).sum().backward()
    assert weight.main_grad.signbit().all()


def test_subnormal_numbers_survive_a_flush_setting(wide):
    x, weight = wide(0, 40, 64) * 2.0**-100, wide(1, 600, 64) * 2.0**-40
    expected = linear(x, weight)
    assert ((expected != 0) & (expected.abs() < torch.finfo(torch.float32).tiny)).any()
    torch.set_flush_denormal(True)
    try:
        flushed = linear(x, weight)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(flushed.view(torch.int32), expected.view(torch.int32))


def test_every_instruction_set_gives_the_same_bits(wide, monkeypatch):
    cases = [
        (wide(0, rows, width, dtype=dtype), wide(1, outputs, width, dtype=dtype))
        for rows, outputs, width in ((1, 9, 37), (3, 20, 130), (7, 40, 515), (19, 33, 64))
        for dtype in (torch.float32, BFLOAT, torch.float16)
    ]
    results = {}
    for variant in library.runnable_variants():
        with monkeypatch.context() as patch:
            patch.setattr(_gemm, "_gemm", _gemm._gemm.on(variant))
            results[variant] = [
                linear(x, weight, out_dtype=out, tp_invariant=tp)
                for x, weight in cases
                for out in (torch.float32, BFLOAT, torch.float16)
                for tp in (False, True)
            ]
    baseline = results.pop("baseline")
    for other in results.values():
        assert all(torch.equal(a, b) for a, b in zip(baseline, other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype):
    good, bad = torch.zeros(2, 4), torch.zeros(2, 4).to(dtype)
    for x, weight in ((bad, good), (good, bad)):
        with pytest.raises(UnsupportedError, match="dtype"):
            linear(x, weight)
    with pytest.raises(UnsupportedError, match="out_dtype"):
        linear(good, good, out_dtype=dtype)
    with pytest.raises(UnsupportedError, match="bias"):
        linear(good, good, torch.zeros(2).to(dtype))


def test_other_devices_and_layouts_are_refused():
    good = torch.zeros(2, 4)
    with pytest.raises(UnsupportedError, match="x is on meta"):
        linear(torch.zeros(2, 4, device="meta"), good)
    with pytest.raises(UnsupportedError, match="layout"):
        linear(good, good.to_sparse())


def test_shapes_that_do_not_fit_are_refused_in_one_line():
    good = torch.zeros(2, 4)
    cases = [
        ((torch.zeros(2, 5), good), {}, "last dimension of x must be 4"),
        ((torch.tensor(1.0), good), {}, "last dimension of x must be 4"),
        ((good, torch.zeros(4)), {}, "weight must have 2 dimensions"),
        ((good, good, torch.zeros(3)), {}, r"bias must have shape \(2,\)"),
        (([1.0], good), {}, "x must be a tensor, got list"),
    ]
    for arguments, options, message in cases:
        with pytest.raises(InvalidInputError, match=message) as caught:
            linear(*arguments, **options)
        assert "\n" not in str(caught.value)
    with pytest.raises(InvalidInputError, match="chunks must be a power of two"):
        row_parallel_partial(good, good, chunks=3)
    with pytest.raises(InvalidInputError, match="number of partials"):
        join_partials([good, good, good])
    with pytest.raises(InvalidInputError, match=r"partials\[1\] must be float32"):
        join_partials([good, good.bfloat16()])
