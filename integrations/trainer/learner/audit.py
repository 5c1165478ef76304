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
        `k3_kl`, `mean_abs_diff`, `max_abs_diff`, `exact_fraction`, `router_flip_rate`,
        `audited_tokens`, `unaudited_tokens`.
    """
    stride = max(1, -(-len(trajectories) // limit))
    chosen = trajectories[::stride]
    scored = score_trajectories(decoder, versions, chosen)
    raise SystemExit(scored)
