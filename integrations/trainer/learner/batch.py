"""From trajectories to packed micro-batches.

A packed batch holds the rows of several trajectories one after another: row r of a trajectory is
the forward pass of its token r and predicts token r + 1, so a trajectory of n tokens has n - 1
rows. All per-row tensors share that indexing; nothing is rolled or shifted later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from integrations.errors import LearnerError
from integrations.trainer.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class ReplayedRoutes:
    """Expert ids to replay, for every row of a packed batch.

    Attributes:
        expert_ids: uint8 or uint16 [rows, moe_layers, topk].
        valid: bool [rows]; rows that are False use the live router.
        layers: decoder layer of each entry of the second dimension.
        experts: number of experts of a layer.
    """

    expert_ids: Tensor
    valid: Tensor
    layers: tuple[int, ...]
    experts: int


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Rows of several trajectories, concatenated.

    Attributes:
        token_ids: int64 [rows], inputs.
        positions: int64 [rows].
        cu_seqlens: int32 [sequences + 1], row offsets.
        selected: int64 [tokens], the rows whose next token is trained on.
        targets: int64 [tokens], that next token.
        rollout_logprobs: fp32 [tokens], as reported by the rollout engine.
        advantages: fp32 [tokens].
        token_cu_seqlens: int32 [sequences + 1], offsets of each trajectory's trained tokens.
        routes: expert ids to replay, or None.
    """

    token_ids: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    selected: Tensor
    targets: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    token_cu_seqlens: Tensor
    routes: ReplayedRoutes | None


def split_by_tokens(lengths: Sequence[int], limit: int) -> list[range]:
    """Cut consecutive items into runs of at most `limit` rows; a longer item stands alone."""
    runs: list[range] = []
    start, rows = 0, 0
    for index, length in enumerate(lengths):
        if index > start and rows + length > limit:
            runs.append(range(start, index))
            start, rows = index, 0
        rows += length
    if start < len(lengths):
        runs.append(range(start, len(lengths)))
    return runs


def pack(
    trajectories: Sequence[Trajectory], advantages: Sequence[float], *, replay: bool
) -> PackedBatch:
    """Concatenate trajectories.

    Args:
        trajectories: at least one, each with at least one response token.
        advantages: one per trajectory.
        replay: carry the routing traces along.

    Raises:
        LearnerError: no trajectories, or replay is asked for and a trace is missing.
    """
    if not trajectories:
        raise LearnerError("a batch needs at least one trajectory")
    tokens: list[int] = []
    positions: list[Tensor] = []
    offsets = [0]
    selected: list[int] = []
    targets: list[int] = []
    logprobs: list[float] = []
    per_token_advantages: list[float] = []
    token_offsets = [0]
    for trajectory, advantage in zip(trajectories, advantages, strict=True):
        rows = len(trajectory.token_ids) - 1
        base = offsets[-1]
        tokens.extend(trajectory.token_ids[:-1])
        positions.append(torch.arange(rows, dtype=torch.int64))
        offsets.append(base + rows)
        for place, logprob in enumerate(trajectory.logprobs):
            token = trajectory.prompt_length + place
            if trajectory.loss_mask[token]:
                selected.append(base + token - 1)
                targets.append(trajectory.token_ids[token])
                logprobs.append(logprob)
                per_token_advantages.append(advantage)
        token_offsets.append(len(targets))
    return PackedBatch(
        token_ids=torch.tensor(tokens, dtype=torch.int64),
        positions=torch.cat(positions),
        cu_seqlens=torch.tensor(offsets, dtype=torch.int32),
        selected=torch.tensor(selected, dtype=torch.int64),
        targets=torch.tensor(targets, dtype=torch.int64),
        rollout_logprobs=torch.tensor(logprobs, dtype=torch.float32),
        advantages=torch.tensor(per_token_advantages, dtype=torch.float32),
        token_cu_seqlens=torch.tensor(token_offsets, dtype=torch.int32),
        routes=_concatenate_routes(trajectories) if replay else None,
    )


def _concatenate_routes(trajectories: Sequence[Trajectory]) -> ReplayedRoutes:
    traces = []
    for trajectory in trajectories:
        if trajectory.routing is None:
            raise LearnerError(
                f"trajectory {trajectory.request_id!r} carries no routing trace; set "
                "routing_replay: false or record routes at rollout"
            )
        traces.append(trajectory.routing)
    layers, experts = traces[0].layers, traces[0].experts
    for trajectory, trace in zip(trajectories, traces, strict=True):
        if trace.layers != layers or trace.experts != experts:
            raise LearnerError(
                f"trajectory {trajectory.request_id!r}: its trace has {len(trace.layers)} MoE "
                f"layers of {trace.experts} experts, the batch has {len(layers)} of {experts}"
            )
    return ReplayedRoutes(
        expert_ids=torch.cat([trace.expert_ids for trace in traces]),
        valid=torch.cat([trace.valid for trace in traces]),
        layers=layers,
        experts=experts,
    )


def pack_supervised(examples: Sequence[tuple[Sequence[int], Sequence[int]]]) -> PackedBatch:
    """Pack (prompt, answer) token pairs; every answer token is a target of weight one."""
    tokens: list[int] = []
    positions: list[Tensor] = []
    offsets = [0]
    selected: list[int] = []
    targets: list[int] = []
    token_offsets = [0]
    for prompt, answer in examples:
        row_tokens = [*prompt, *answer]
        base = offsets[-1]
        tokens.extend(row_tokens[:-1])
        positions.append(torch.arange(len(row_tokens) - 1, dtype=torch.int64))
        offsets.append(base + len(row_tokens) - 1)
        first = base + len(prompt) - 1
        selected.extend(range(first, first + len(answer)))
        targets.extend(answer)
        token_offsets.append(len(targets))
    return PackedBatch(
        token_ids=torch.tensor(tokens, dtype=torch.int64),
        positions=torch.cat(positions),
        cu_seqlens=torch.tensor(offsets, dtype=torch.int32),
        selected=torch.tensor(selected, dtype=torch.int64),
        targets=torch.tensor(targets, dtype=torch.int64),
        rollout_logprobs=torch.zeros(len(targets), dtype=torch.float32),
        advantages=torch.ones(len(targets), dtype=torch.float32),
        token_cu_seqlens=torch.tensor(token_offsets, dtype=torch.int32),
        routes=None,
    )
