from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.kernels import rotary, rotary_table

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def formula(x, positions, table):
    half = x.shape[-1] // 2
    cos, sin = (part[positions][:, None].to(x.dtype) for part in table.split(half, dim=1))
    return torch.cat(
        (
            x[..., :half] * cos - x[..., half:] * sin,
            x[..., half:] * cos + x[..., :half] * sin,
        ),
        dim=-1,
    )


def run(x, positions, table, grad):
    x = x.detach().requires_grad_()
    y = rotary(x, positions, table)
    return y.detach(), torch.autograd.grad(y, x, grad)[0]


def test_the_table_is_rounded_once_from_float64():
    table = rotary_table(6, 5000, 1e6)
    angles = 4321 * 1e6 ** (-torch.arange(0, 6, 2, dtype=torch.float64) / 6)
    assert table.dtype == torch.float32
    assert torch.equal(table[4321, :3], angles.cos().float())
    assert torch.equal(table[4321, 3:], angles.sin().float())


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 20),
    st.integers(1, 5),
    st.integers(1, 70),
    DTYPES,
    st.integers(0, 10**6),
    st.data(),
)
def test_a_heads_result_and_gradient_do_not_depend_on_its_batch(
    wide, tokens, heads, half, dtype, seed, data
):
    table = rotary_table(2 * half, 100, 1e4)
    positions = torch.randint(0, 100, (tokens,), generator=torch.Generator().manual_seed(seed))
    x = wide(seed, tokens, heads, 2 * half, dtype=dtype)
    grad = wide(seed + 1, tokens, heads, 2 * half, dtype=dtype)
    y, grad_x = run(x, positions, table, grad)
    picked = data.draw(st.lists(st.integers(0, tokens - 1), max_size=30))
    head = data.draw(st.integers(0, heads - 1))
    y_part, grad_part = run(
        x[picked, head : head + 1], positions[picked], table, grad[picked, head : head + 1]
    )
    assert torch.equal(y_part, y[picked, head : head + 1])
    assert torch.equal(grad_part, grad_x[picked, head : head + 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_as_accurate_as_torch(wide, error, dtype):
    table, positions = rotary_table(64, 300, 1e4), torch.arange(200) + 50
    x, grad = wide(0, 200, 3, 64, dtype=dtype), wide(1, 200, 3, 64, dtype=dtype)
    exact_x, their_x = x.double().requires_grad_(), x.clone().requires_grad_()
    exact = formula(exact_x, positions, table)
    theirs = formula(their_x, positions, table)
    (exact_grad,) = torch.autograd.grad(exact, exact_x, grad.double())
    (their_grad,) = torch.autograd.grad(theirs, their_x, grad)
    ours = run(x, positions, table, grad)
    for got, other, want in zip(ours, (theirs, their_grad), (exact, exact_grad), strict=True):
        assert error(got, want.detach()) <= 1.2 * error(other.detach(), want.detach())
        assert error(got, want.detach()) < torch.finfo(dtype).eps


def test_heads_cut_from_a_fused_projection_give_the_same_bits(wide):
    fused = wide(0, 30, 5 * 32)
    table, positions = rotary_table(32, 40, 1e4), torch.arange(30, dtype=torch.int32)
    heads = fused.view(30, 5, 32)
    expected = rotary(heads[:, 2:4].clone(), positions.long(), table)
    assert torch.equal(rotary(heads[:, 2:4], positions, table), expected)
    turned = heads[:, 2:4].permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert torch.equal(rotary(turned, positions, table), expected)
    expanded = heads[:, 2:3].expand(-1, 2, -1)
    assert torch.equal(rotary(expanded, positions, table)[:, 1], expected[:, 0])
    grads = run(turned, positions, table, turned), run(turned.clone(), positions, table, turned)
    assert torch.equal(grads[0][1], grads[1][1])


def test_one_and_two_threads_give_the_same_bits(wide, threads):
    x, table, positions = wide(0, 400, 4, 64), rotary_table(64, 400, 1e4), torch.arange(400)
    with threads(1):
        one = run(x, positions, table, x)
    with threads(2):
        two = run(x, positions, table, x)
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[1], two[1])


def test_strides_beyond_two_to_the_31_elements_are_addressed():
    x = torch.empty(2**31 + 64, dtype=torch.bfloat16).as_strided((2, 1, 32), (2**31, 32, 1))
    x.copy_(torch.arange(64).view(2, 1, 32))
    table, positions = rotary_table(32, 10, 1e4), torch.tensor([3, 7])
    assert torch.equal(rotary(x, positions, table), rotary(x.contiguous(), positions, table))


def test_empty_inputs_work():
    table = rotary_table(8, 4, 1e4)
    nothing = torch.empty(0, dtype=torch.int64)
    assert rotary(torch.empty(0, 2, 8), nothing, table).shape == (0, 2, 8)
    assert rotary(torch.empty(3, 0, 8), torch.arange(3), table).shape == (3, 0, 8)


@pytest.mark.parametrize("position", [-1, 10, 2**40])
def test_a_position_outside_the_table_raises(position):
    with pytest.raises(InvalidInputError, match=rf"positions\[1\] is {position}, outside.* 10 pos"):
        rotary(torch.ones(2, 1, 8), torch.tensor([0, position]), rotary_table(8, 10, 1e4))


def test_bad_arguments_are_named():
    table = rotary_table(8, 4, 1e4)
    with pytest.raises(InvalidInputError, match="one even last dimension"):
        rotary(torch.ones(2, 1, 6), torch.arange(2), table)
    with pytest.raises(InvalidInputError, match="positions must have shape"):
        rotary(torch.ones(2, 1, 8), torch.arange(3), table)
    with pytest.raises(UnsupportedError, match="positions must be int64 or int32"):
        rotary(torch.ones(2, 1, 8), torch.ones(2), table)
    with pytest.raises(UnsupportedError, match="table must be float32"):
        rotary(torch.ones(2, 1, 8), torch.arange(2), table.bfloat16())
    with pytest.raises(InvalidInputError, match="head_dim must be even"):
        rotary_table(7, 4, 1e4)
    with pytest.raises(InvalidInputError, match="theta"):
        rotary_table(8, 4, 0.0)
