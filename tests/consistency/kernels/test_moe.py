from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.kernels import (
    grouped_linear,
    linear,
    moe_combine,
    moe_experts,
    moe_permute,
    route,
    silu_and_mul,
)

EXPERTS, HIDDEN, INNER, SLOTS = 6, 40, 24, 3


def operands(wide, seed, tokens, dtype=torch.float32, hidden=HIDDEN, inner=INNER):
    # Scaled so that float16 does not overflow: NaN has no equal.
    x = (wide(seed, tokens, hidden) / 16).to(dtype)
    gate_up = (wide(seed + 1, EXPERTS, 2 * inner, hidden) / hidden).to(dtype)
    down = (wide(seed + 2, EXPERTS, hidden, inner) / inner).to(dtype)
    weights, ids = route(wide(seed + 3, tokens, EXPERTS) / 8, SLOTS)
    return x, gate_up, down, weights, ids


def run(x, gate_up, down, weights, ids, grad, tp_invariant=False):
    leaves = tuple(tensor.detach().requires_grad_() for tensor in (x, gate_up, down, weights))
    x, gate_up, down, weights = leaves
    y = moe_experts(x, gate_up, down, weights, ids, tp_invariant=tp_invariant)
    return y.detach(), *torch.autograd.grad(y, leaves, grad)


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    tp_invariant=st.booleans(),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_a_tokens_result_and_gradients_do_not_depend_on_its_batch(
    wide, tokens, dtype, tp_invariant, seed, data
):
    sizes = {"hidden": 256, "inner": 128} if tp_invariant else {}
    x, gate_up, down, weights, ids = operands(wide, seed, tokens, dtype, **sizes)
    grad = (wide(seed + 4, *x.shape) / 16).to(dtype)
    y, grad_x, _, _, grad_weights = run(x, gate_up, down, weights, ids, grad, tp_invariant)
    picked = data.draw(st.lists(st.integers(0, tokens - 1), max_size=30))
    part = run(x[picked], gate_up, down, weights[picked], ids[picked], grad[picked], tp_invariant)
    assert torch.equal(part[0], y[picked])
    assert torch.equal(part[1], grad_x[picked])
    assert torch.equal(part[4], grad_weights[picked])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_experts_one_by_one_added_in_slot_order(wide, dtype):
    x, gate_up, down, weights, ids = operands(wide, 0, 17, dtype)
    y = moe_experts(x, gate_up, down, weights, ids)
    for token in range(17):
        total = torch.zeros(HIDDEN, dtype=torch.float64)
        for slot in range(SLOTS):
            expert = int(ids[token, slot])
            hidden = silu_and_mul(linear(x[token], gate_up[expert]))
            output = linear(hidden, down[expert], out_dtype=torch.float32)
            # A product of two floats is exact in float64: this is a fused multiply-add, but for
            # sums that round twice, of which this data has none.
            total = (total + weights[token, slot].double() * output.double()).float().double()
        assert torch.equal(y[token], total.to(dtype))


def test_the_order_of_slots_is_the_order_of_the_sum(wide):
    x, gate_up, down, weights, ids = operands(wide, 0, 50)
    turned = moe_experts(x, gate_up, down, weights.flip(1), ids.flip(1))
    straight = moe_experts(x, gate_up, down, weights, ids)
    assert not torch.equal(turned, straight)
    torch.testing.assert_close(turned, straight, rtol=1e-3, atol=1e-3 * float(straight.abs().max()))


def test_gradients_are_those_of_float64(error):
    generator = torch.Generator().manual_seed(0)
    x, gate_up, down, grad = (
        torch.randn(shape, generator=generator)
        for shape in (
            (30, HIDDEN),
            (EXPERTS, 2 * INNER, HIDDEN),
            (EXPERTS, HIDDEN, INNER),
            (30, HIDDEN),
        )
    )
    weights, ids = route(torch.randn(30, EXPERTS, generator=generator), SLOTS)
    ours = run(x, gate_up, down, weights, ids, grad)
    leaves = [t.double().requires_grad_() for t in (x, gate_up, down, weights)]
    exact_x, exact_gate_up, exact_down, exact_weights = leaves
    gate, up = torch.einsum("th,tsih->tsi", exact_x, exact_gate_up[ids]).chunk(2, dim=-1)
    hidden = torch.nn.functional.silu(gate) * up
    exact = torch.einsum("ts,tshi,tsi->th", exact_weights, exact_down[ids], hidden)
    wanted = (exact, *torch.autograd.grad(exact, leaves, grad.double()))
    for got, want in zip(ours, wanted, strict=True):
        assert error(got, want.detach()) < 1e-6


def test_threads_and_strides_change_no_bit(wide, threads):
    arguments = operands(wide, 0, 64, torch.bfloat16)
    grad = wide(4, 64, HIDDEN, dtype=torch.bfloat16)
    with threads(1):
        expected = run(*arguments, grad)
    with threads(2):
        for got, want in zip(run(*arguments, grad), expected, strict=True):
            assert torch.equal(got, want)
    x, gate_up, down, weights, ids = (tensor.mT.contiguous().mT for tensor in arguments)
    turned = run(x, gate_up, down, weights, ids, grad.mT.contiguous().mT)
    for got, want in zip(turned, expected, strict=True):
        assert torch.equal(got, want)


def test_main_grad_is_accumulated_in_float32(wide):
    x, gate_up, down, weights, ids = operands(wide, 0, 30)
    grad = wide(4, 30, HIDDEN)
    _, _, grad_gate_up, grad_down, _ = run(x, gate_up, down, weights, ids, grad)
    gate_up, down = gate_up.requires_grad_(), down.requires_grad_()
    start = [wide(5, *gate_up.shape), wide(6, *down.shape)]
    gate_up.main_grad, down.main_grad = (tensor.clone() for tensor in start)
    moe_experts(x, gate_up, down, weights, ids).backward(grad)
    assert gate_up.grad is None and down.grad is None
    assert torch.equal(gate_up.main_grad, start[0] + grad_gate_up)
    assert torch.equal(down.main_grad, start[1] + grad_down)


def test_no_tokens():
    empty = moe_experts(
        torch.zeros(0, HIDDEN),
        torch.zeros(EXPERTS, 2 * INNER, HIDDEN),
        torch.zeros(EXPERTS, HIDDEN, INNER),
        torch.zeros(0, SLOTS),
        torch.zeros(0, SLOTS, dtype=torch.int64),
    )
    assert empty.shape == (0, HIDDEN)


@pytest.mark.parametrize(
    ("position", "value", "error", "message"),
    [
        (4, torch.tensor([[0, 6, 1], [0, 1, 2]]), InvalidInputError, r"ids\[0, 1\] is 6"),
        (4, torch.tensor([[0, 2, 1], [-1, 1, 2]]), InvalidInputError, r"ids\[1, 0\] is -1"),
        (4, torch.zeros(2, 2, dtype=torch.int64), InvalidInputError, "ids must have shape"),
        (1, torch.zeros(6, 47, 40), InvalidInputError, r"gate_up must have an even shape\[1\]"),
        (2, torch.zeros(6, 40, 23), InvalidInputError, "down must have shape"),
        (3, torch.zeros(2, 3, dtype=torch.bfloat16), UnsupportedError, "weights must be float32"),
        (0, torch.zeros(2, 40, dtype=torch.float64), UnsupportedError, "x has dtype"),
    ],
)
def test_bad_arguments_are_named(wide, position, value, error, message):
    arguments = list(operands(wide, 0, 2))
    arguments[position] = value
    with pytest.raises(error, match=message):
        moe_experts(*arguments)


def test_permute_products_and_combine_are_the_experts(wide):
    x, ids = wide(0, 9, 16), torch.randint(0, 4, (9, 2), generator=torch.Generator().manual_seed(1))
    gate_up, down, weights = wide(1, 4, 24, 16), wide(2, 4, 16, 12), wide(3, 9, 2)
    rows, place, offsets = moe_permute(x, ids, 4)
    assert torch.equal(rows[place], x[:, None].expand(9, 2, 16))
    hidden = silu_and_mul(grouped_linear(rows, gate_up, offsets))
    outputs = grouped_linear(hidden, down, offsets, out_dtype=torch.float32)
    combined = moe_combine(outputs, weights, place, x.dtype)
    assert torch.equal(combined, moe_experts(x, gate_up, down, weights, ids))


def test_the_gradient_of_permute_and_combine_flows_in_slot_order(wide):
    x, weights = wide(0, 5, 8).requires_grad_(), wide(1, 5, 3).requires_grad_()
    ids = torch.tensor([[0, 1, 2]] * 5)
    rows, place, _ = moe_permute(x, ids, 3)
    moe_combine(rows, weights, place, torch.float32).backward(torch.ones(5, 8))
    assert torch.allclose(weights.grad, x.detach().sum(-1, keepdim=True).expand(5, 3), atol=1e-4)
    total = weights.detach().sum(-1, keepdim=True).expand(5, 8)
    assert torch.allclose(x.grad, total, atol=1e-4)


def test_permute_and_combine_refuse_what_does_not_fit(wide):
    x, ids = wide(0, 2, 4), torch.tensor([[0], [7]])
    with pytest.raises(InvalidInputError, match="ids must be from 0 to 3"):
        moe_permute(x, ids, 4)
    with pytest.raises(InvalidInputError, match="place must lie in"):
        moe_combine(x, torch.ones(2, 1), torch.tensor([[0], [2]]), torch.float32)
    with pytest.raises(UnsupportedError, match="weights must be float32"):
        moe_combine(x, torch.ones(2, 1).half(), torch.tensor([[0], [1]]), torch.float32)
