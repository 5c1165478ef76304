"""Log-probabilities of given tokens under a transformers model, patched or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from consistency import kernels
from integrations.errors import RequestError

__all__ = ["score_tokens"]


def score_tokens(
    model: Any, sequences: Sequence[Sequence[int]], *, temperature: float = 1.0
) -> list[torch.Tensor]:
    """log p(token i + 1 | tokens up to i) of every token but the first of each sequence.

    Sequences are scored in one padded batch (at the back, which changes no bit of the contract).
    Gradients flow if they are enabled. A patched model's logits are fp32 and go to
    `kernels.token_logprob`; other logits are turned to fp32 and go through torch's log-softmax, as
    trainers on transformers do.

    Args:
        model: a causal language model.
        sequences: token ids, at least two each.
        temperature: finite and above 0.

    Returns:
        fp32 ``[tokens - 1]`` per sequence.

    Raises:
        RequestError: a sequence with fewer than two tokens.
    """
    lengths = [len(sequence) for sequence in sequences]
    for index, length in enumerate(lengths):
        if length < 2:
            raise RequestError(f"sequence {index} has {length} tokens: scoring needs two or more")
    ids = torch.zeros((len(sequences), max(lengths, default=0)), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : lengths[row]] = torch.tensor(sequence)
        mask[row, : lengths[row]] = 1
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    keep = mask[:, 1:].bool()
    rows, targets = logits[:, :-1][keep], ids[:, 1:][keep]
    if logits.dtype == torch.float32:
        logprobs, _ = kernels.token_logprob(rows, targets, temperature=temperature)
    else:
        scaled = rows.float() / temperature
        logprobs = scaled.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    return list(logprobs.split([length - 1 for length in lengths]))
