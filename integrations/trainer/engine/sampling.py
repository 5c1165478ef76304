"""Sampled tokens and their logprobs, from the same fp32 logits."""

from __future__ import annotations

import numpy as np
import torch

from consistency import kernels

__all__ = ["logprob_temperature", "sample_tokens"]


def logprob_temperature(temperature: float) -> float:
    """The temperature under which logprobs are reported, as the nearest fp32 number.

    Greedy tokens report temperature 1: the distribution at 0 has no logprob worth training on.
    """
    return float(np.float32(temperature)) if temperature > 0.0 else 1.0


def sample_tokens(
    logits: torch.Tensor, temperature: np.ndarray, seeds: np.ndarray, positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Draw one token per row.

    Args:
        logits: fp32 ``[rows, vocab]``.
        temperature: fp32 ``[rows]``, 0 for the most probable token.
        seeds: int64 ``[rows]``, of the requests.
        positions: int64 ``[rows]``, where the new tokens stand in their sequences.

    Returns:
        Token ids int64 ``[rows]`` and their logprobs fp32 ``[rows]``.
    """
    tokens = kernels.sample(
        logits,
        temperature=torch.from_numpy(temperature),
        seeds=torch.from_numpy(seeds),
        positions=torch.from_numpy(positions),
    )
    logprobs = np.empty(len(positions), np.float32)
    for value in np.unique(temperature):
        of_rows = temperature == value
        chosen = slice(None) if of_rows.all() else torch.from_numpy(np.flatnonzero(of_rows))
        logprob, _ = kernels.token_logprob(
            logits[chosen], tokens[chosen], temperature=logprob_temperature(float(value))
        )
        logprobs[of_rows] = logprob.numpy()
    return tokens.numpy(), logprobs
