from __future__ import annotations

import pytest
import torch

from consistency.kernels import (
    join_lm_head_partials,
    lm_head_logits,
    lm_head_logprob,
    lm_head_partial,
    token_logprob,
)

INF = float("inf")


def gradients(function, leaves, grads):
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    return torch.autograd.grad(function(*leaves), leaves, grads)


def exact(logits, targets, temperature):
    logs = (logits / temperature).log_softmax(-1)
    return logs.gather(1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


@pytest.mark.parametrize("width", [70, 1024])
def test_logprob_entropy_and_their_gradient_are_accurate(error, width):
    logits, targets = torch.randn(5, width) * 4, torch.randint(0, width, (5,))
    found = token_logprob(logits, targets, temperature=0.7)
    for value, wanted in zip(found, exact(logits.double(), targets, 0.7), strict=True):
        assert error(value, wanted) < 1e-6
    grads = torch.randn(5), torch.randn(5)
    (ours,) = gradients(lambda x: token_logprob(x, targets, temperature=0.7), [logits], grads)
    (theirs,) = gradients(
        lambda x: exact(x, targets, 0.7), [logits.double()], [grad.double() for grad in grads]
    )
    assert error(ours, theirs) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_head_reports_the_bits_of_the_sampler(wide, dtype):
    hidden, weight = wide(0, 5, 64, dtype=dtype), wide(1, 256, 64, dtype=dtype) / 8
    targets = torch.tensor([0, 255, 3, 100, 31])
    fused = lm_head_logprob(hidden, weight, targets, temperature=0.9)
    stored = token_logprob(lm_head_logits(hidden, weight), targets, temperature=0.9)
    assert all(torch.equal(a, b) for a, b in zip(fused, stored, strict=True))
    alone = lm_head_logprob(hidden[2:3], weight, targets[2:3], temperature=0.9)
    assert all(torch.equal(a[0], b[2]) for a, b in zip(alone, fused, strict=True))


def test_the_gradient_of_the_fused_head_is_accurate(error):
    hidden, weight = torch.randn(4, 40), torch.randn(128, 40) / 4
    targets, grads = torch.tensor([0, 127, 3, 100]), (torch.randn(4), torch.randn(4))
    ours = gradients(
        lambda h, w: lm_head_logprob(h, w, targets, temperature=0.9), [hidden, weight], grads
    )
    theirs = gradients(
        lambda h, w: exact(h @ w.t(), targets, 0.9),
        [hidden.double(), weight.double()],
        [grad.double() for grad in grads],
    )
    for value, wanted in zip(ours, theirs, strict=True):
        assert error(value, wanted) < 2e-6


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_hold_slices_of_the_vocabulary_agree_with_one(wide, ranks):
    hidden, weight = wide(0, 3, 40), wide(1, 256, 40) / 8
    targets = torch.tensor([0, 255, 100])
    share = 256 // ranks
    partials = [
        lm_head_partial(
            hidden,
            weight[rank * share : (rank + 1) * share],
            targets,
            temperature=0.9,
            first=rank * share,
            parts=4 // ranks,
        )
        for rank in range(ranks)
    ]
    joined = join_lm_head_partials(partials)
    whole = lm_head_logprob(hidden, weight, targets, temperature=0.9)
    assert all(torch.equal(a, b) for a, b in zip(joined, whole, strict=True))


def test_masked_logits_add_nothing_and_rows_without_a_softmax_are_nan():
    logits = torch.randn(4, 128)
    logits[0, 64:] = -INF
    logits[1], logits[2, 5], logits[3, 5] = -INF, INF, float("nan")
    targets = torch.tensor([3, 0, 0, 0])
    logprob, entropy = token_logprob(logits, targets, temperature=1.0)
    alone = exact(logits[:1, :64].double(), targets[:1], 1.0)
    assert abs(logprob[0] - alone[0][0]) < 1e-6 and abs(entropy[0] - alone[1][0]) < 1e-6
    assert logprob[1:].isnan().all() and entropy[1:].isnan().all()
