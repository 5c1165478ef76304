from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.kernels import (
    join_lm_head_partials,
    library,
    lm_head_logprob,
    lm_head_partial,
    vocabulary_parallel,
)

BFLOAT = torch.bfloat16
INFINITY = float("inf")


def split(hidden, weight, targets, ranks, temperature):
    """The partials of `ranks` ranks whose parts make up the eight of the whole vocabulary."""
    width = weight.shape[0] // ranks
    return [
        lm_head_partial(
            hidden,
            weight[rank * width : (rank + 1) * width],
            targets,
            temperature=temperature,
            first=rank * width,
            parts=8 // ranks,
        )
        for rank in range(ranks)
    ]


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(0, 9),
    vocabulary=st.sampled_from([512, 1024, 9728]),
    dtype=st.sampled_from([torch.float32, BFLOAT, torch.float16]),
    temperature=st.sampled_from([1.0, 0.6]),
    seed=st.integers(0, 10**6),
)
def test_any_number_of_ranks_has_the_bits_of_one(wide, rows, vocabulary, dtype, temperature, seed):
    hidden, weight = wide(seed, rows, 24, dtype=dtype), wide(seed + 1, vocabulary, 24, dtype=dtype)
    targets = torch.randint(0, vocabulary, (rows,), generator=torch.Generator().manual_seed(seed))
    whole = lm_head_logprob(hidden, weight, targets, temperature=temperature)
    for ranks in (1, 2, 4, 8):
        partials = split(hidden, weight, targets, ranks, temperature)
        for given_partials in (partials, torch.stack(partials)):
            joined = join_lm_head_partials(given_partials)
            assert all(torch.equal(a, b) for a, b in zip(joined, whole, strict=True))


def test_a_rank_whose_logits_are_all_minus_infinity_adds_nothing(wide):
    hidden, weight = wide(0, 3, 8).abs(), wide(1, 512, 8)
    masked = weight.clone()
    masked[:64] = -INFINITY
    targets = torch.tensor([70, 200, 511])
    whole = lm_head_logprob(hidden, masked, targets, temperature=1.0)
    assert whole[0].isfinite().all() and whole[1].isfinite().all()
    joined = join_lm_head_partials(split(hidden, masked, targets, 8, 1.0))
    assert all(torch.equal(a, b) for a, b in zip(joined, whole, strict=True))
    exact = torch.log_softmax((hidden.double() @ weight[64:].double().t()), -1)
    chosen = exact.gather(1, (targets - 64)[:, None])[:, 0]
    assert torch.allclose(joined[0].double(), chosen, rtol=1e-5, atol=1e-5)
    entropy = -(exact.exp() * exact).sum(-1)
    assert torch.allclose(joined[1].double(), entropy, rtol=1e-5, atol=1e-5)


def test_rows_without_a_softmax_are_nan_on_any_number_of_ranks(wide):
    hidden, weight = wide(0, 4, 8).abs() + 0.1, wide(1, 512, 8)
    weight[5, 0] = float("nan")
    hidden[1] = 0.0
    targets = torch.tensor([0, 1, 2, 511])
    for ranks in (1, 2, 8):
        joined = join_lm_head_partials(split(hidden, weight, targets, ranks, 1.0))
        assert all(result.isnan().all() for result in joined)
    nothing = torch.full((512, 8), -INFINITY)
    joined = join_lm_head_partials(split(hidden.clamp_min(0.1), nothing, targets, 4, 1.0))
    assert all(result.isnan().all() for result in joined)


def test_logits_hundreds_apart_between_ranks_join_as_in_float64(wide):
    hidden, weight = torch.ones(2, 8), wide(0, 512, 8)
    weight[64:128] += 40.0
    weight[300:] -= 60.0
    targets = torch.tensor([100, 400])
    exact = torch.log_softmax(hidden.double() @ weight.double().t(), -1)
    logprob, entropy = join_lm_head_partials(split(hidden, weight, targets, 8, 1.0))
    chosen = exact.gather(1, targets[:, None])[:, 0]
    assert torch.allclose(logprob.double(), chosen, rtol=1e-6, atol=1e-4)
    assert torch.allclose(entropy.double(), -(exact.exp() * exact).sum(-1), rtol=1e-4, atol=1e-5)


def test_every_instruction_set_gives_the_same_partials(wide, monkeypatch):
    hidden, weight, targets = wide(0, 5, 16), wide(1, 2048, 16), torch.arange(5) * 400
    results = []
    for variant in library.runnable_variants():
        with monkeypatch.context() as patch:
            for name in ("_partial_kernel", "_join_kernel"):
                patch.setattr(
                    vocabulary_parallel, name, getattr(vocabulary_parallel, name).on(variant)
                )
            partials = split(hidden, weight, targets, 2, 0.7)
            results.append((*partials, *join_lm_head_partials(partials)))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_what_does_not_fit_is_refused_in_one_line(wide):
    hidden, weight, targets = wide(0, 2, 4), wide(1, 64, 4), torch.tensor([0, 1])

    def partial(**changes):
        options = {"temperature": 1.0, "first": 0, "parts": 1, **changes}
        return lm_head_partial(hidden, weight, targets, **options)

    with pytest.raises(InvalidInputError, match="chunks must be a power of two"):
        partial(parts=3)
    with pytest.raises(InvalidInputError, match="first must be 0 or more, got -1"):
        partial(first=-1)
    with pytest.raises(InvalidInputError, match="temperature"):
        partial(temperature=0.0)
    with pytest.raises(InvalidInputError, match="number of partials must be a power of two, got 3"):
        join_lm_head_partials([partial()] * 3)
    with pytest.raises(InvalidInputError, match="got none"):
        join_lm_head_partials([])
    with pytest.raises(UnsupportedError, match="vocabulary_parallel_logprob"):
        lm_head_partial(hidden.requires_grad_(), weight, targets, temperature=1, first=0, parts=1)
