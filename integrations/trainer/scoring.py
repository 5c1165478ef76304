"""Compute the logprobs of finished trajectories again, under the versions that produced them.

A trajectory that was interrupted by swaps was not sampled from one model: each row of its KV was
built by some version, and a token's logprob depends on all rows before it *as they were then*. The
trajectory's build log tells which rows were built when and under what. Replaying it over a paged
cache gives every sampled token the very inputs it had, so the logprobs must agree bit for bit;
what is left over is drift. A token for which a needed version is not at hand is reported as not
scored; it is never scored with other weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from consistency import kernels
from consistency.routing_replay import RoutingRecorder
from integrations.errors import TrajectoryError
from integrations.trainer.engine.sampling import logprob_temperature
from integrations.trainer.model.attention import KeyValueCache, PagedAttention
from integrations.trainer.model.decoder import Decoder
from integrations.trainer.model.weights import EMBEDDING, lm_head_weight
from integrations.trainer.trajectory import Segment, Trajectory

__all__ = ["ScoredTrajectory", "score_trajectories", "score_trajectory"]

_BLOCK = 16


@dataclass(frozen=True, slots=True)
class ScoredTrajectory:
    """Logprobs and routes of a trajectory, computed again.

    Attributes:
        request_id: of the trajectory.
        logprobs: fp32 ``[response]``, 0 where not scored.
        scored: bool ``[response]``, whether every version that the token depends on was at hand.
        expert_ids: int64 ``[rows, moe_layers, topk]`` of the live router in the pass that produced
            each row's logprob, or None for a dense model.
        routed: bool ``[rows]``, rows whose ``expert_ids`` were computed.
        flips: (row, layer) pairs whose set of experts differs from the trajectory's trace.
        compared: (row, layer) pairs that were compared; 0 without a trace.
    """

    request_id: str
    logprobs: torch.Tensor
    scored: torch.Tensor
    expert_ids: torch.Tensor | None
    routed: torch.Tensor
    flips: int
    compared: int


def score_trajectory(
    decoder: Decoder,
    weights_by_version: Mapping[int, Mapping[str, torch.Tensor]],
    trajectory: Trajectory,
) -> ScoredTrajectory:
    """:func:`score_trajectories` of one trajectory."""
    return score_trajectories(decoder, weights_by_version, [trajectory])[0]


def score_trajectories(
    decoder: Decoder,
    weights_by_version: Mapping[int, Mapping[str, torch.Tensor]],
    trajectories: Sequence[Trajectory],
    *,
    max_tokens: int = 4096,
) -> list[ScoredTrajectory]:
    """Replay the build logs of ``trajectories``, batched across trajectories.

    Args:
        decoder: the model; its contract must be the one the trajectories were sampled under.
        weights_by_version: the versions at hand. Tokens that depend on another are not scored.
        trajectories: with build logs, as the engine returns them.
        max_tokens: most rows held in the cache and computed in one pass; a longer trajectory is
            processed alone.

    Returns:
        One result per trajectory, in order.

    Raises:
        TrajectoryError: a trajectory comes from another contract, has no build log, or has token
            ids or positions that the model does not have.
    """
    for trajectory in trajectories:
        _validate(decoder, trajectory)
    results: list[ScoredTrajectory] = []
    with torch.no_grad():
        for group in _groups(trajectories, max_tokens):
            results.extend(_score_group(decoder, weights_by_version, group))
    return results


def _validate(decoder: Decoder, trajectory: Trajectory) -> None:
    where = f"trajectory {trajectory.request_id!r}"
    digest = decoder.contract.digest()
    if trajectory.contract_digest != digest:
        raise TrajectoryError(
            f"{where} was sampled under contract {trajectory.contract_digest}, "
            f"this decoder runs {digest}; equal bits are promised under one contract only"
        )
    if trajectory.versions and not trajectory.segments:
        raise TrajectoryError(f"{where} has no segments, so its versions cannot be replayed")
    if len(trajectory.token_ids) - 1 > decoder.max_positions:
        raise TrajectoryError(
            f"{where} has {len(trajectory.token_ids)} tokens, the model {decoder.max_positions} "
            "positions"
        )
    vocabulary = decoder.config.vocab_size
    if not 0 <= min(trajectory.token_ids) <= max(trajectory.token_ids) < vocabulary:
        raise TrajectoryError(f"{where} has a token id outside the vocabulary of {vocabulary}")


def _groups(trajectories: Iterable[Trajectory], max_tokens: int) -> Iterator[list[Trajectory]]:
    """Consecutive trajectories whose rows fit into one cache."""
    group: list[Trajectory] = []
    held = 0
    for trajectory in trajectories:
        rows = -(-(len(trajectory.token_ids) - 1) // _BLOCK) * _BLOCK
        if group and held + rows > max_tokens:
            yield group
            group, held = [], 0
        group.append(trajectory)
        held += rows
    if group:
        yield group


@dataclass(slots=True)
class _Replay:
    """One trajectory while its build log is replayed.

    Attributes:
        first_slot: where its rows start in the cache.
        tokens: int64 ``[tokens]``.
        clean: bool ``[rows]``: the row in the cache is what the engine had at this point.
        seen: bool ``[rows]``: an entry of the log has covered the row.
    """

    trajectory: Trajectory
    first_slot: int
    log: list[Segment]
    tokens: torch.Tensor
    clean: torch.Tensor
    seen: torch.Tensor
    logprobs: torch.Tensor
    scored: torch.Tensor
    expert_ids: torch.Tensor | None
    routed: torch.Tensor
    done: int = field(default=0)

    @property
    def next(self) -> Segment | None:
        """The entry to replay next."""
        return self.log[self.done] if self.done < len(self.log) else None


def _score_group(
    decoder: Decoder,
    weights_by_version: Mapping[int, Mapping[str, torch.Tensor]],
    trajectories: Sequence[Trajectory],
) -> list[ScoredTrajectory]:
    """Replay a group that shares one cache: version by version, all trajectories at once."""
    replays = _prepare(decoder, trajectories)
    slots = sum(-(-(len(t.token_ids) - 1) // _BLOCK) * _BLOCK for t in trajectories)
    caches: list[KeyValueCache] | None = None
    while True:
        _skip_impossible(replays, weights_by_version)
        pending: dict[int, list[_Replay]] = {}
        for replay in replays:
            if replay.next is not None:
                pending.setdefault(replay.next.weight_version, []).append(replay)
        if not pending:
            return [_result(replay) for replay in replays]
        # Trajectories do not see each other, so any order between them is the order of the log.
        version = max(pending, key=lambda number: len(pending[number]))
        weights = weights_by_version[version]
        if caches is None:
            config = decoder.config
            caches = [
                KeyValueCache.allocate(
                    slots // _BLOCK,
                    _BLOCK,
                    config.kv_heads,
                    config.head_dim,
                    weights[EMBEDDING].dtype,
                )
                for _ in range(config.layers)
            ]
        _replay_entries(decoder, weights, caches, pending[version])


def _prepare(decoder: Decoder, trajectories: Sequence[Trajectory]) -> list[_Replay]:
    config = decoder.config
    width = (len(config.moe_layers), config.experts_per_token)
    replays: list[_Replay] = []
    first_slot = 0
    for trajectory in trajectories:
        rows = len(trajectory.token_ids) - 1
        response = len(trajectory.versions)
        replays.append(
            _Replay(
                trajectory=trajectory,
                first_slot=first_slot,
                log=_needed(trajectory.segments),
                tokens=torch.tensor(trajectory.token_ids, dtype=torch.int64),
                clean=torch.zeros(rows, dtype=torch.bool),
                seen=torch.zeros(rows, dtype=torch.bool),
                logprobs=torch.zeros(response, dtype=torch.float32),
                scored=torch.zeros(response, dtype=torch.bool),
                expert_ids=torch.zeros((rows, *width), dtype=torch.int64) if width[0] else None,
                routed=torch.zeros(rows, dtype=torch.bool),
            )
        )
        first_slot += -(-rows // _BLOCK) * _BLOCK
    return replays


def _needed(segments: Sequence[Segment]) -> list[Segment]:
    """The log without repetitions: under one single version a second pass gives the same bits."""
    if len({segment.weight_version for segment in segments}) != 1:
        return list(segments)
    stop = max(segment.stop for segment in segments)
    return [Segment(0, stop, segments[0].weight_version, segments[0].origin)]


def _skip_impossible(
    replays: Sequence[_Replay], weights_by_version: Mapping[int, Mapping[str, torch.Tensor]]
) -> None:
    """Pass over entries whose version, or some row before them, is not at hand."""
    for replay in replays:
        while (entry := replay.next) is not None:
            known = entry.weight_version in weights_by_version
            if known and bool(replay.clean[: entry.start].all()):
                break
            replay.clean[entry.start : entry.stop] = False
            replay.seen[entry.start : entry.stop] = True
            replay.done += 1


def _replay_entries(
    decoder: Decoder,
    weights: Mapping[str, torch.Tensor],
    caches: Sequence[KeyValueCache],
    replays: Sequence[_Replay],
) -> None:
    """One packed forward pass over the next entry of each of ``replays``."""
    entries = [entry for replay in replays if (entry := replay.next) is not None]
    spans = [torch.arange(entry.start, entry.stop) for entry in entries]
    positions = torch.cat(spans)
    counts = torch.tensor([len(span) for span in spans])
    ends = [entry.stop for entry in entries]
    blocks = torch.arange(-(-max(ends) // _BLOCK), dtype=torch.int32)
    # Rows of a trajectory lie one after the other; entries past its last block are never read.
    last = caches[0].keys.shape[0] - 1
    tables = torch.stack([(blocks + r.first_slot // _BLOCK).clamp(max=last) for r in replays])
    attention = PagedAttention(
        caches=caches,
        block_tables=tables,
        query_starts=torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).int(),
        context_lengths=torch.tensor(ends, dtype=torch.int32),
        slots=torch.cat([span + r.first_slot for span, r in zip(spans, replays, strict=True)]),
    )
    config = decoder.config
    recorder = None
    if config.moe_layers:
        recorder = RoutingRecorder(config.moe_layers, config.experts, config.experts_per_token)
    tokens = torch.cat([r.tokens[e.start : e.stop] for r, e in zip(replays, entries, strict=True)])
    hidden = decoder.forward(weights, tokens, positions, attention, recorder)
    routes = None if recorder is None else recorder.take()
    offset = 0
    wanted: list[tuple[_Replay, torch.Tensor, torch.Tensor]] = []
    for replay, entry, span in zip(replays, entries, spans, strict=True):
        fresh = span[~replay.seen[span]]
        packed = fresh - entry.start + offset
        if routes is not None and replay.expert_ids is not None:
            # Convert before indexing: uint16 tensors have few operations.
            of_entry = routes[offset : offset + len(span)].to(torch.int64)
            replay.expert_ids[fresh] = of_entry[fresh - entry.start]
            replay.routed[fresh] = True
        sampled = fresh >= replay.trajectory.prompt_length - 1
        sampled &= fresh < len(replay.tokens) - 1
        wanted.append((replay, fresh[sampled], packed[sampled]))
        replay.clean[entry.start : entry.stop] = True
        replay.seen[entry.start : entry.stop] = True
        replay.done += 1
        offset += len(span)
    _store_logprobs(hidden, lm_head_weight(weights), wanted)


def _store_logprobs(
    hidden: torch.Tensor,
    head: torch.Tensor,
    wanted: Sequence[tuple[_Replay, torch.Tensor, torch.Tensor]],
) -> None:
    """Logprobs of the tokens that follow the wanted rows, one call per temperature."""
    by_temperature: dict[float, list[tuple[_Replay, torch.Tensor, torch.Tensor]]] = {}
    for item in wanted:
        temperature = logprob_temperature(item[0].trajectory.temperature)
        by_temperature.setdefault(temperature, []).append(item)
    for temperature, items in by_temperature.items():
        packed = torch.cat([rows for _, _, rows in items])
        targets = torch.cat([replay.tokens[rows + 1] for replay, rows, _ in items])
        logprob, _ = kernels.lm_head_logprob(hidden[packed], head, targets, temperature=temperature)
        pieces = logprob.split([len(rows) for _, rows, _ in items])
        for (replay, rows, _), piece in zip(items, pieces, strict=True):
            index = rows - (replay.trajectory.prompt_length - 1)
            replay.logprobs[index] = piece
            replay.scored[index] = True


def _result(replay: _Replay) -> ScoredTrajectory:
    flips = compared = 0
    trace = replay.trajectory.routing
    if trace is not None and replay.expert_ids is not None:
        known = trace.valid & replay.routed
        theirs = trace.expert_ids.to(torch.int64)[known].sort(dim=-1).values
        ours = replay.expert_ids[known].sort(dim=-1).values
        differs = (theirs != ours).any(dim=-1)
        flips, compared = int(differs.sum()), differs.numel()
    return ScoredTrajectory(
        request_id=replay.trajectory.request_id,
        logprobs=replay.logprobs,
        scored=replay.scored,
        expert_ids=replay.expert_ids,
        routed=replay.routed,
        flips=flips,
        compared=compared,
    )
