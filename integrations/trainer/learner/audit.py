"""The drift audit: rollout logprobs against the learner's, token by token, same weight version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from consistency.metrics import mismatch_metrics
from integrations.trainer.model.decoder import Decoder
from integrations.trainer.scoring import score_trajectories
from integrations.trainer.trajectory import Trajectory


def audit_drift(
    decoder: Decoder,
    versions: Mapping[int, Mapping[str, Tensor]],
    trajectories: Sequence[Trajectory],
    *,
    limit: int,
) -> dict[str, float]:
    """Score trajectories again under the very versions that sampled them, and compare.

    Args:
        decoder: the learner's model definition.
        versions: weights by version; tokens of other versions are counted as unaudited.
        trajectories: the batch of a step.
        limit: at most this many are scored, spread evenly over the batch.

    Returns:
        The keys of `NO_AUDIT`. `router_flip_rate` is the share of the `router_pairs` (row, layer)
        in which the learner's live router picks another set of experts than the rollout's did.
    """
    stride = max(1, -(-len(trajectories) // limit))
    chosen = trajectories[::stride]
    scored = score_trajectories(decoder, versions, chosen)
    ours = torch.cat([result.logprobs[result.scored] for result in scored])
    theirs = torch.cat(
        [
            torch.tensor(sample.logprobs, dtype=torch.float32)[result.scored]
            for sample, result in zip(chosen, scored, strict=True)
        ]
    )
    pairs = sum(result.compared for result in scored)
    drift = mismatch_metrics(ours, theirs)
    return {
        "k3_kl": drift.k3_kl,
        "mean_abs_diff": drift.mean_abs_diff,
        "max_abs_diff": drift.max_abs_diff,
        "exact_fraction": drift.exact_fraction if ours.numel() else 1.0,
        "router_flip_rate": sum(result.flips for result in scored) / pairs if pairs else 0.0,
        "router_pairs": float(pairs),
        "audited_tokens": float(ours.numel()),
        "unaudited_tokens": float(sum(int((~result.scored).sum()) for result in scored)),
    }


NO_AUDIT = {
    "k3_kl": 0.0,
    "mean_abs_diff": 0.0,
    "max_abs_diff": 0.0,
    "exact_fraction": 1.0,
    "router_flip_rate": 0.0,
    "router_pairs": 0.0,
    "audited_tokens": 0.0,
    "unaudited_tokens": 0.0,
}
"""Metrics of a step without an audit; `audited_tokens` = 0 says that nothing was measured."""
