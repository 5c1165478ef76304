from __future__ import annotations

import pytest
import torch

from consistency.errors import InvalidInputError
from consistency.kernels import attention_paged, attention_varlen
from consistency.kernels._dispatch import triton_kernels
from consistency.kernels.attention import _Pages
from consistency.kernels.triton.attention import Mask

BFLOAT = torch.bfloat16
SCALE = 0.25


def exact(q, k, v, window=None, sinks=None, soft_cap=None, scale=SCALE):
    """One sequence, in the dtype of the arguments."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("thd,shd->hts", q, k) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    t, s = torch.arange(q.shape[0])[:, None], torch.arange(k.shape[0])[None, :]
    seen = s <= t
    if window is not None:
        seen = seen & (s > t - window)
    scores = scores.masked_fill(~seen, -float("inf"))
    if sinks is not None:
        extra = sinks[:, None, None].expand(-1, q.shape[0], 1)
        scores = torch.cat((scores, extra), 2)
    weights = scores.softmax(2)[:, :, : k.shape[0]]
    return torch.einsum("hts,shd->thd", weights, v)


def paged(k, v, block_size, contexts, order):
    """The caches and tables of sequences of which k and v hold `contexts` keys, one by one."""
    counts = [-(-c // block_size) for c in contexts]
    blocks = sum(counts)
    places = torch.randperm(blocks, generator=torch.Generator().manual_seed(order)).tolist()
    caches = [
        torch.full((blocks, block_size, *x.shape[1:]), float("nan")).to(x.dtype) for x in (k, v)
    ]
    tables = torch.full((len(contexts), max(counts)), -7, dtype=torch.int32)
    start = 0
    for row, context in enumerate(contexts):
        for number in range(counts[row]):
            place = places.pop()
            tables[row, number] = place
            size = min(block_size, context - number * block_size)
            first = start + number * block_size
            for cache, x in zip(caches, (k, v), strict=True):
                cache[place, :size] = x[first : first + size]
        start += context
    return *caches, tables


MASKS = [
    {},
    {"window": 20},
    {"sinks": torch.tensor([0.3, -1.0])},
    {"soft_cap": 1.5},
    {"window": 50, "sinks": torch.tensor([5.0, -3.0]), "soft_cap": 4.0},
]


@pytest.mark.parametrize("options", MASKS)
def test_attention_is_accurate_forward_and_backward(error, options):
    q, k, v = torch.randn(70, 2, 24), torch.randn(70, 1, 24), torch.randn(70, 1, 24)
    grad = torch.randn(70, 2, 24)
    sinks = options.get("sinks")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    if sinks is not None:
        leaves.append(sinks.clone().requires_grad_())
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    starts = torch.tensor([0, 70], dtype=torch.int32)

    def call(function, tensors, *arguments, **extra):
        keys = options | ({"sinks": tensors[3]} if sinks is not None else {})
        return function(*tensors[:3], *arguments, **keys, **extra)

    ours = call(attention_varlen, leaves, starts, scale=SCALE)
    theirs = call(exact, doubles)
    assert error(ours.detach(), theirs.detach()) < 1e-6
    found = torch.autograd.grad(ours, leaves, grad)
    wanted = torch.autograd.grad(theirs, doubles, grad.double())
    for value, expected in zip(found, wanted, strict=True):
        assert error(value, expected) < 3e-6


@pytest.mark.parametrize("dtype", [BFLOAT, torch.float16])
def test_attention_in_16_bits_is_as_accurate_as_its_rounding(error, dtype):
    q, k, v = (torch.randn(40, h, 32).to(dtype) for h in (2, 1, 1))
    starts = torch.tensor([0, 40], dtype=torch.int32)
    y = attention_varlen(q, k, v, starts, scale=SCALE)
    assert error(y, exact(q.double(), k.double(), v.double())) < torch.finfo(dtype).eps


def test_prefill_chunks_and_decode_give_a_query_the_same_bits(wide):
    lengths = [130, 3, 70]
    total = sum(lengths)
    q, k, v = wide(0, total, 4, 16) / 8, wide(1, total, 2, 16) / 8, wide(2, total, 2, 16)
    bounds = [0, 130, 133, 203]
    options = {"window": 90, "sinks": torch.randn(4)}
    starts = torch.tensor(bounds, dtype=torch.int32)
    whole = attention_varlen(q, k, v, starts, scale=SCALE, **options)
    k_cache, v_cache, tables = paged(k, v, 8, lengths, 0)
    # The last queries of each sequence: a chunk, all, and a single decode step.
    counts = [33, 3, 1]
    rows = torch.cat([torch.arange(b - c, b) for b, c in zip(bounds[1:], counts, strict=True)])
    chunk_starts = torch.tensor([0, 33, 36, 37], dtype=torch.int32)
    contexts = torch.tensor(lengths, dtype=torch.int32)
    part = attention_paged(
        q[rows], k_cache, v_cache, tables, chunk_starts, contexts, scale=SCALE, **options
    )
    assert torch.equal(part, whole[rows])
    alone = attention_varlen(
        q[130:133], k[130:133], v[130:133], torch.tensor([0, 3], dtype=torch.int32), scale=SCALE,
        **options,
    )  # fmt: skip
    assert torch.equal(alone, whole[130:133])


@pytest.mark.parametrize("window", [None, 600])
def test_splits_in_parallel_and_in_sequence_give_the_same_bits(wide, error, window):
    context = 1100
    q, k, v = wide(0, 2, 4, 16) / 8, wide(1, context, 2, 16) / 8, wide(2, context, 2, 16)
    k_cache, v_cache, tables = paged(k, v, 64, [context], 1)
    pages = _Pages(tables, torch.tensor([context], dtype=torch.int32), 64, k_cache.shape[0])
    starts = torch.tensor([0, 2], dtype=torch.int32)
    sinks = torch.randn(4)
    mask = Mask(window=window, sinks=sinks)
    results = [
        triton_kernels("attention").forward(
            q, k_cache, v_cache, starts, SCALE, pages, None, mask, parallel=parallel
        )
        for parallel in (False, True)
    ]
    assert torch.equal(*results)
    padded = torch.cat([torch.zeros(context - 2, 4, 16), q]).double()
    wanted = exact(padded, k.double(), v.double(), window=window, sinks=sinks.double())
    assert error(results[0], wanted[-2:]) < 1e-5


def test_a_head_dimension_of_256_has_one_split(error):
    q, k, v = (torch.randn(20, h, 200) for h in (2, 1, 1))
    starts = torch.tensor([0, 20], dtype=torch.int32)
    y = attention_varlen(q, k, v, starts, scale=0.07)
    assert error(y, exact(q.double(), k.double(), v.double(), scale=0.07)) < 1e-6


@pytest.mark.parametrize(
    ("starts", "contexts", "message"),
    [
        ([0, 3], [2], "context_lengths"),
        ([0, 3], [99], "block_tables"),
        ([1, 3], [3], "query_starts"),
    ],
)
def test_impossible_sequences_are_refused(starts, contexts, message):
    cache = torch.zeros(2, 8, 1, 16)
    with pytest.raises(InvalidInputError, match=message):
        attention_paged(
            torch.zeros(3, 1, 16),
            cache,
            cache,
            torch.tensor([[0, 1]], dtype=torch.int32),
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(contexts, dtype=torch.int32),
            scale=1.0,
        )


def test_no_tokens_and_an_empty_sequence(error):
    empty = torch.zeros(0, 2, 16)
    nothing = torch.zeros(1, dtype=torch.int32)
    assert attention_varlen(empty, empty, empty, nothing, scale=1.0).shape == (0, 2, 16)
    q = torch.randn(3, 2, 16)
    starts = torch.tensor([0, 0, 3, 3], dtype=torch.int32)
    y = attention_varlen(q, q, q, starts, scale=SCALE)
    assert error(y, exact(q.double(), q.double(), q.double())) < 1e-6
