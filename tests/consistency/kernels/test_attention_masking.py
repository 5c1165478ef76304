"""Sliding windows, sinks and soft-caps: the same bits in prefill and decode, near float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.kernels import attention_paged, attention_varlen

# pyright: reportArgumentType=false
OPTIONS = [
    {"window": 1},
    {"window": 7},
    {"window": 64},
    {"window": 100},
    {"soft_cap": 5.0},
    {"sinks": True},
    {"window": 70, "soft_cap": 3.0, "sinks": True},
]


def inputs(wide, seed, tokens, heads=(4, 2), width=24, dtype=torch.float32):
    q = wide(seed, tokens, heads[0], width, dtype=dtype)
    k, v = (wide(seed + i, tokens, heads[1], width, dtype=dtype) for i in (1, 2))
    return q, k, v, torch.randn(heads[0], generator=torch.Generator().manual_seed(seed))


def with_sinks(options, sinks):
    return {**options, **({"sinks": sinks} if options.get("sinks") else {})}


def exact(q, k, v, scale, window=None, sinks=None, soft_cap=None):
    """One sequence, in the dtype of its arguments."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    t = torch.arange(q.shape[0])
    seen = t[:, None] >= t
    if window is not None:
        seen = seen & (t[:, None] - t < window)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(t), 1)], -1)
    weights = scores.softmax(-1)[..., : len(t)]
    return torch.einsum("hts,shd->thd", weights, v)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("tokens", [5, 200])
def test_values_and_gradients_are_near_float64(error, options, tokens):
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, 4, 24), (tokens, 2, 24), (tokens, 2, 24), (4,))
    leaves = [torch.randn(s, generator=generator).requires_grad_() for s in shapes]
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    grad = torch.randn(shapes[0], generator=generator)
    chosen = leaves if options.get("sinks") else leaves[:3]
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    y = attention_varlen(
        leaves[0], leaves[1], leaves[2], starts, scale=0.3, **with_sinks(options, leaves[3])
    )
    reference = exact(doubles[0], doubles[1], doubles[2], 0.3, **with_sinks(options, doubles[3]))
    assert error(y.detach(), reference.detach()) < 2e-6
    gradients = torch.autograd.grad(y, chosen, grad)
    references = torch.autograd.grad(reference, doubles[: len(chosen)], grad.double())
    for got, want in zip(gradients, references, strict=True):
        assert (got - want).norm() <= 5e-6 * (want.norm() + grad.norm())


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 300),
    page=st.sampled_from([1, 16, 40]),
    options=st.sampled_from(OPTIONS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_a_query_has_the_same_bits_in_prefill_decode_and_any_batch(
    wide, tokens, page, options, dtype, seed, data
):
    q, k, v, sinks = inputs(wide, seed, tokens, dtype=dtype)
    other = inputs(wide, seed + 9, 50, dtype=dtype)
    chosen = with_sinks(options, sinks)
    starts = torch.tensor([0, 50, 50 + tokens], dtype=torch.int32)
    batch = [torch.cat([a, b]) for a, b in zip(other[:3], (q, k, v), strict=True)]
    whole = attention_varlen(batch[0], batch[1], batch[2], starts, scale=0.4, **chosen)[50:]
    count = data.draw(st.integers(1, tokens))
    pages = -(-tokens // page)
    caches = []
    for keys in (k, v):
        cache = torch.full((pages + 1, page, *keys.shape[1:]), float("nan"), dtype=dtype)
        cache[1:].view(-1, *keys.shape[1:])[:tokens] = keys
        caches.append(cache)
    got = attention_paged(
        q[-count:],
        caches[0],
        caches[1],
        torch.arange(1, pages + 1, dtype=torch.int32)[None],
        torch.tensor([0, count], dtype=torch.int32),
        torch.tensor([tokens], dtype=torch.int32),
        scale=0.4,
        **chosen,
    )
    assert torch.equal(got, whole[-count:])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_threads_and_repetition_change_no_bit_of_the_gradients(wide, threads, options):
    q, k, v, sinks = inputs(wide, 0, 150)
    starts = torch.tensor([0, 20, 150], dtype=torch.int32)
    results = []
    for count in (1, 2, 2):
        leaves = [t.clone().requires_grad_() for t in (q, k, v, sinks)]
        with threads(count):
            y = attention_varlen(
                leaves[0], leaves[1], leaves[2], starts, scale=0.4, **with_sinks(options, leaves[3])
            )
            used = leaves if options.get("sinks") else leaves[:3]
            results.append((y.detach(), *torch.autograd.grad(y.square().sum(), used)))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_keys_outside_the_window_may_be_anything(wide):
    q, k, v, _ = inputs(wide, 0, 100)
    starts = torch.tensor([0, 100], dtype=torch.int32)
    expected = attention_varlen(q, k, v, starts, scale=0.4, window=10)
    k[:50], v[:50] = float("nan"), float("inf")
    got = attention_varlen(q, k, v, starts, scale=0.4, window=10)
    assert torch.equal(got[60:], expected[60:])


def test_a_window_as_long_as_the_sequence_is_no_window(wide):
    q, k, v, _ = inputs(wide, 0, 90)
    starts = torch.tensor([0, 90], dtype=torch.int32)
    plain = attention_varlen(q, k, v, starts, scale=0.4)
    assert torch.equal(attention_varlen(q, k, v, starts, scale=0.4, window=90), plain)
    nothing = torch.full((4,), -float("inf"))
    assert torch.equal(attention_varlen(q, k, v, starts, scale=0.4, sinks=nothing), plain)


def test_what_cannot_be_is_refused(wide):
    q, k, v, sinks = inputs(wide, 0, 4)
    starts = torch.tensor([0, 4], dtype=torch.int32)
    for error_type, match, options in (
        (InvalidInputError, "window must be an integer of 1 or more", {"window": 0}),
        (InvalidInputError, "soft_cap must be finite", {"soft_cap": -1.0}),
        (InvalidInputError, "sinks must have shape", {"sinks": sinks[:2]}),
        (UnsupportedError, "sinks must be float32", {"sinks": sinks.half()}),
    ):
        with pytest.raises(error_type, match=match):
            attention_varlen(q, k, v, starts, scale=1.0, **options)
