from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.kernels import attention_paged, attention_varlen

QUERY_HEADS, KEY_HEADS = 6, 2
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def starts_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def operands(wide, seed, tokens, head_dim, dtype=torch.float32):
    q = wide(seed, tokens, QUERY_HEADS, head_dim, dtype=dtype)
    k = wide(seed + 1, tokens, KEY_HEADS, head_dim, dtype=dtype)
    v = wide(seed + 2, tokens, KEY_HEADS, head_dim, dtype=dtype)
    return q, k, v


def run(q, k, v, starts, grad):
    q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
    out = attention_varlen(q, k, v, starts, scale=0.125)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), grad)


def paged(k, v, lengths, block_size, seed):
    """The keys and values of packed sequences, scattered over the blocks of a cache."""
    blocks = [-(-length // block_size) for length in lengths]
    generator = torch.Generator().manual_seed(seed)
    free = torch.randperm(sum(blocks) + 3, generator=generator).int()
    # What no sequence wrote must not be read: NaN would show.
    caches = [
        torch.full((len(free), block_size, *x.shape[1:]), float("nan"), dtype=x.dtype)
        for x in (k, v)
    ]
    tables = torch.full((len(lengths), max(blocks) + 1), -1, dtype=torch.int32)
    start = used = 0
    for sequence, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
        tables[sequence, :count] = free[used : used + count]
        used += count
        for position in range(length):
            block = int(tables[sequence, position // block_size])
            for cache, packed in zip(caches, (k, v), strict=True):
                cache[block, position % block_size] = packed[start + position]
        start += length
    return caches[0], caches[1], tables


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(
        st.one_of(st.integers(0, 20), st.sampled_from([63, 64, 65, 130])), min_size=1, max_size=5
    ),
    head_dim=st.sampled_from([1, 8, 24, 64]),
    dtype=DTYPES,
    seed=st.integers(0, 10**6),
)
def test_a_sequence_and_its_gradients_do_not_depend_on_the_batch(
    wide, lengths, head_dim, dtype, seed
):
    tokens, starts = sum(lengths), starts_of(lengths)
    packed = operands(wide, seed, tokens, head_dim, dtype)
    grad = wide(seed + 3, tokens, QUERY_HEADS, head_dim, dtype=dtype)
    whole = run(*packed, starts, grad)
    for sequence, length in enumerate(lengths):
        rows = slice(int(starts[sequence]), int(starts[sequence + 1]))
        q, k, v = (x[rows] for x in packed)
        alone = run(q, k, v, starts_of([length]), grad[rows])
        for got, want in zip(alone, whole, strict=True):
            assert torch.equal(got, want[rows])


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(
        st.one_of(st.integers(1, 20), st.sampled_from([64, 65, 129])), min_size=1, max_size=4
    ),
    block_size=st.sampled_from([1, 3, 16, 64]),
    head_dim=st.sampled_from([8, 24, 64]),
    dtype=DTYPES,
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_decode_and_chunked_prefill_over_pages_have_the_bits_of_one_packed_pass(
    wide, lengths, block_size, head_dim, dtype, seed, data
):
    q, k, v = operands(wide, seed, sum(lengths), head_dim, dtype)
    starts = starts_of(lengths)
    whole = attention_varlen(q, k, v, starts, scale=0.3)
    keys, values, tables = paged(k, v, lengths, block_size, seed)
    # Of every sequence some prefix is computed, and of it some last rows are new.
    contexts = [data.draw(st.integers(1, length)) for length in lengths]
    new = [data.draw(st.integers(1, context)) for context in contexts]
    rows = torch.cat(
        [
            int(starts[i]) + torch.arange(context - count, context)
            for i, (context, count) in enumerate(zip(contexts, new, strict=True))
        ]
    )
    context_lengths = torch.tensor(contexts, dtype=torch.int32)
    part = attention_paged(
        q[rows], keys, values, tables, starts_of(new), context_lengths, scale=0.3
    )
    assert torch.equal(part, whole[rows])


def test_decoding_token_by_token_at_a_real_width_equals_prefill(wide):
    """9 query heads and 3 key heads of 64: the shape of a hidden size of 576."""
    tokens = 200
    q = wide(0, tokens, 9, 64, dtype=torch.bfloat16)
    k, v = (wide(seed, tokens, 3, 64, dtype=torch.bfloat16) for seed in (1, 2))
    whole = attention_varlen(q, k, v, starts_of([tokens]), scale=0.125)
    keys, values, tables = paged(k, v, [tokens], 16, 3)
    one = starts_of([1])
    for position in range(tokens):
        context = torch.tensor([position + 1], dtype=torch.int32)
        row = attention_paged(
            q[position : position + 1], keys, values, tables, one, context, scale=0.125
        )
        assert torch.equal(row[0], whole[position])


def reference(q, k, v, lengths, scale):
    group = q.shape[1] // k.shape[1]
    outputs = []
    for q_s, k_s, v_s in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        k_s, v_s = (x.repeat_interleave(group, 1) for x in (k_s, v_s))
        scores = torch.einsum("qhd,khd->hqk", q_s, k_s) * scale
        mask = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(mask, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v_s))
    return torch.cat(outputs)


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)]
)
def test_outputs_and_gradients_are_those_of_float64(error, dtype, limit):
    lengths, generator = [70, 1, 150], torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(221, heads, 32, generator=generator).to(dtype)
        for heads in (QUERY_HEADS, KEY_HEADS, KEY_HEADS, QUERY_HEADS)
    )
    ours = run(q, k, v, starts_of(lengths), grad)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    exact = reference(leaves[0], leaves[1], leaves[2], lengths, 0.125)
    wanted = (exact, *torch.autograd.grad(exact, leaves, grad.double()))
    for got, want in zip(ours, wanted, strict=True):
        assert error(got, want.detach()) < limit


def test_threads_and_strides_change_no_bit(wide, threads):
    starts = starts_of([100, 7, 93])
    packed = operands(wide, 0, 200, 24)
    grad = wide(3, 200, QUERY_HEADS, 24)
    with threads(1):
        expected = run(*packed, starts, grad)
    with threads(2):
        for got, want in zip(run(*packed, starts, grad), expected, strict=True):
            assert torch.equal(got, want)
    # One tensor that holds q, k and v of a token side by side, as the model has it.
    qkv = torch.cat(packed, dim=1)
    q, k, v = qkv.split([QUERY_HEADS, KEY_HEADS, KEY_HEADS], dim=1)
    assert torch.equal(attention_varlen(q, k, v, starts, scale=0.125), expected[0])
    q, k, v = (x.permute(2, 0, 1).contiguous().permute(1, 2, 0) for x in packed)
    assert torch.equal(attention_varlen(q, k, v, starts, scale=0.125), expected[0])


def test_a_broken_row_does_not_reach_other_sequences_or_earlier_tokens(wide):
    q, k, v = operands(wide, 0, 30, 8)
    starts = starts_of([10, 10, 10])
    expected = attention_varlen(q, k, v, starts, scale=0.3)
    k, v = k.clone(), v.clone()
    k[15], v[15] = float("nan"), float("inf")
    broken = attention_varlen(q, k, v, starts, scale=0.3)
    clean = [*range(15), *range(20, 30)]
    assert torch.equal(broken[clean], expected[clean])
    assert broken[15:20].isnan().all()


def test_no_tokens_and_no_sequences():
    q, k = torch.zeros(0, QUERY_HEADS, 8), torch.zeros(0, KEY_HEADS, 8)
    for lengths in ([], [0, 0]):
        assert attention_varlen(q, k, k, starts_of(lengths), scale=1.0).shape == q.shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"starts": [0, 3]}, "cu_seqlens must run from 0 to the 4 rows"),
        ({"starts": [0, 5, 4]}, "cu_seqlens must run from 0"),
        ({"starts": []}, "cu_seqlens must have at least the entry 0"),
        ({"k": torch.zeros(3, 2, 8)}, r"k must have shape \(4, 2, 8\)"),
        ({"k": torch.zeros(4, 4, 8)}, "heads of q must be a multiple of those of k, got 6 and 4"),
        ({"v": torch.zeros(4, 2, 8, dtype=torch.float16)}, "q, k and v must share a dtype"),
        ({"scale": float("nan")}, "scale must be finite"),
    ],
)
def test_bad_arguments_are_named(change, message):
    good = {"q": torch.zeros(4, 6, 8), "k": torch.zeros(4, 2, 8), "v": torch.zeros(4, 2, 8)}
    good |= {"starts": [0, 4], "scale": 1.0} | change
    starts = torch.tensor(good["starts"], dtype=torch.int32)
    with pytest.raises(InvalidInputError, match=message):
        attention_varlen(good["q"], good["k"], good["v"], starts, scale=good["scale"])


@pytest.mark.parametrize(
    ("context", "table", "message"),
    [
        (1, [0, 1], r"context_lengths\[0\] is 1, less than its 2 queries"),
        (9, [0, 1], r"context_lengths\[0\] is 9, more than the 2 blocks of 4"),
        (6, [0, 3], r"block_tables\[0\] is \[0, 3\]; the ids of its first 2 blocks"),
        (6, [-1, 1], r"block_tables\[0\] is \[-1, 1\]"),
    ],
)
def test_pages_that_cannot_hold_the_context_are_named(context, table, message):
    cache = torch.zeros(3, 4, 2, 8)
    with pytest.raises(InvalidInputError, match=message):
        attention_paged(
            torch.zeros(2, 6, 8),
            cache,
            cache,
            torch.tensor([table], dtype=torch.int32),
            starts_of([2]),
            torch.tensor([context], dtype=torch.int32),
            scale=1.0,
        )


def test_a_dtype_or_head_that_the_kernels_do_not_take_is_refused():
    with pytest.raises(UnsupportedError, match="float64"):
        x = torch.zeros(2, 2, 8, dtype=torch.float64)
        attention_varlen(x, x, x, starts_of([2]), scale=1.0)
    with pytest.raises(UnsupportedError, match="head_dim must be from 1 to 256, got 257"):
        x = torch.zeros(2, 2, 257)
        attention_varlen(x, x, x, starts_of([2]), scale=1.0)
    with pytest.raises(UnsupportedError, match="cu_seqlens"):
        x = torch.zeros(2, 2, 8)
        attention_varlen(x, x, x, starts_of([2]).long(), scale=1.0)
