"""Log-probabilities and routes of given sequences under a Megatron-Core model, patched or not."""

# Megatron-Core is installed beside the engine tests only.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch import distributed
from torch._C._distributed_c10d import HashStore

from consistency import NumericsContract, kernels
from consistency.routing_replay import RoutingTrace
from integrations.errors import RequestError
from integrations.megatron.batch import Batch, SampledAnswer
from integrations.megatron.compatibility import core_model, moe_layers
from integrations.megatron.cpu import on_cpu
from integrations.megatron.loading import load_model
from integrations.megatron.model import ModelOptions
from integrations.megatron.patching import OPERATIONS, patch
from integrations.megatron.replay import record_routes, replay_routes

__all__ = ["Scores", "score_answers", "score_tokens", "single_process"]


@dataclass(frozen=True, slots=True)
class Scores:
    """What a pass made of its sequences.

    Attributes:
        logprobs: fp32 ``[tokens - 1]`` per sequence: log p(token i + 1 | tokens up to i).
        routes: int64 ``[tokens - 1, moe_layers, topk]`` per sequence; empty unless recorded.
    """

    logprobs: list[torch.Tensor]
    routes: list[torch.Tensor]


def score_tokens(
    model: Any,
    sequences: Sequence[Sequence[int]],
    *,
    temperature: float = 1.0,
    packed: bool = False,
    record: bool = False,
    traces: Sequence[RoutingTrace] | None = None,
) -> Scores:
    """Scores sequences in one pass; every rank of the model calls it, and gets the same.

    Gradients flow if they are enabled and the model has one pipeline stage. A patched model's
    logits are fp32 and go to `kernels.token_logprob`; other logits are turned to fp32 and go
    through torch's log-softmax.

    Args:
        model: a `GPTModel`, or a wrapper around one.
        sequences: token ids, at least two each.
        temperature: finite and above 0.
        packed: lay the sequences one after the other instead of padding them; Megatron-Core's own
            attention cannot, the contract's can.
        record: also return the routes of an MoE model, replayed or not.
        traces: replay these routes, one trace for each sequence without its last token.

    Raises:
        RequestError: a sequence with fewer than two tokens.
        RoutingTraceError, RoutingReplayError: traces that do not fit.
    """
    inner = core_model(model)
    for index, sequence in enumerate(sequences):
        if len(sequence) < 2:
            raise RequestError(
                f"sequence {index} has {len(sequence)} tokens: scoring needs two or more"
            )
    group = inner.pg_collection.tp
    inputs = [list(sequence[:-1]) for sequence in sequences]
    batch = Batch(tuple(map(len, inputs)), multiple=group.size(), packed=packed)
    routing: Any = nullcontext({})
    if traces is not None:
        routing = replay_routes(model, [(batch, traces)])
    elif record:
        routing = record_routes(model)
    with routing as routes:
        logits = _forward(model, inner, batch, batch.token_ids(inputs))
    if logits is None:
        logprobs = [torch.empty(length) for length in batch.lengths]
    else:
        logprobs = _logprobs(inner, batch, logits, sequences, temperature)
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        logprobs = [_from_last_stage(values) for values in logprobs]
    if not record:
        return Scores(logprobs, [])
    return Scores(logprobs, _routes(inner, batch, routes))


def _forward(model: Any, inner: Any, batch: Batch, ids: torch.Tensor) -> torch.Tensor | None:
    """Logits ``[b, width, vocabulary]``, or this rank's columns; None before the last stage."""
    packing = None
    if batch.packed:
        starts = batch.starts
        longest = int(starts.diff().max())
        packing = PackedSeqParams(
            "thd", starts, starts, max_seqlen_q=longest, max_seqlen_kv=longest
        )
    positions = torch.arange(batch.width).expand(ids.shape)

    def step(data: Iterable[torch.Tensor], stage: Any) -> Any:
        tokens = next(iter(data))
        output = stage(tokens, positions, None, packed_seq_params=packing)
        return output, lambda logits, non_loss_data: logits

    if inner.config.pipeline_model_parallel_size == 1:
        return model(ids, positions, None, packed_seq_params=packing)
    found = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter([ids]),
        model=[model],
        num_microbatches=1,
        seq_length=batch.width,
        micro_batch_size=ids.shape[0],
        forward_only=True,
        collect_non_loss_data=True,
    )
    return found[0] if found else None


def _logprobs(
    inner: Any,
    batch: Batch,
    logits: torch.Tensor,
    sequences: Sequence[Sequence[int]],
    temperature: float,
) -> list[torch.Tensor]:
    if logits.shape[-1] != inner.vocab_size:
        logits = gather_from_tensor_model_parallel_region(logits, group=inner.pg_collection.tp)
    by_row = logits.transpose(0, 1).flatten(0, 1)
    rows = torch.cat([batch.rows_of(index) for index in range(len(sequences))])
    targets = torch.tensor([token for sequence in sequences for token in sequence[1:]])
    chosen = by_row.index_select(0, rows)
    if logits.dtype == torch.float32:
        values, _ = kernels.token_logprob(chosen, targets, temperature=temperature)
    else:
        scaled = chosen.float() / temperature
        values = scaled.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    return list(values.split(list(batch.lengths)))


def _from_last_stage(values: torch.Tensor) -> torch.Tensor:
    values = values.detach().contiguous()
    distributed.broadcast(
        values,
        parallel_state.get_pipeline_model_parallel_last_rank(),
        group=parallel_state.get_pipeline_model_parallel_group(),
    )
    return values


def _routes(
    inner: Any, batch: Batch, recorded: Mapping[int, list[torch.Tensor]]
) -> list[torch.Tensor]:
    """Routes of every sequence, from the layers of all stages and the rows of all ranks."""
    layers = moe_layers(inner.config)
    shape = (batch.rows, inner.config.moe_router_topk)
    columns = []
    for layer in layers:
        ids = torch.zeros(shape, dtype=torch.int64)
        if layer in recorded:
            (rows,) = recorded[layer]
            share = slice(None)
            if inner.config.sequence_parallel:
                group = inner.pg_collection.tp
                share = batch.share(group.rank(), group.size())
            ids[share] = rows
        if inner.config.sequence_parallel:
            distributed.all_reduce(ids, group=inner.pg_collection.tp)
        if inner.config.pipeline_model_parallel_size > 1:
            distributed.all_reduce(ids, group=parallel_state.get_pipeline_model_parallel_group())
        columns.append(ids)
    whole = torch.stack(columns, dim=1)
    return [whole[batch.rows_of(index)] for index in range(len(batch.lengths))]


@contextmanager
def single_process() -> Iterator[None]:
    """Megatron-Core on the CPU with this process as its only rank, taken down at the end."""
    with on_cpu():
        distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        try:
            parallel_state.initialize_model_parallel()
            try:
                yield
            finally:
                parallel_state.destroy_model_parallel()
        finally:
            distributed.destroy_process_group()


def score_answers(
    model: str,
    answers: Sequence[SampledAnswer],
    operations: Sequence[str] | None,
    *,
    contract: NumericsContract | None = None,
    replay: bool = False,
    batch: int = 16,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Scores answers as a trainer does: one pass over whole sequences, gradients enabled.

    In a process that is no rank yet, it makes itself the only one for the time being.

    Args:
        model: checkpoint folder.
        answers: to score.
        operations: to route to the contract, those of `OPERATIONS` among them; None for stock
            Megatron-Core.
        contract: by default that of the model.
        replay: send the tokens to the experts of the answers' traces.
        batch: sequences per pass.

    Returns:
        fp32 ``[answer]`` and int64 ``[tokens - 1, moe_layers, topk]`` of each answer; no routes
        for a dense model.
    """
    alone = nullcontext() if distributed.is_initialized() else single_process()
    with alone:
        loaded = load_model(model, ModelOptions(sequence_parallel=_several_ranks())).train()
        if operations is not None:
            chosen = [name for name in OPERATIONS if name in operations]
            patch(loaded, contract=contract, operations=chosen)
        sparse = bool(loaded.config.num_moe_experts)
        logprobs: list[torch.Tensor] = []
        routes: list[torch.Tensor] = []
        for start in range(0, len(answers), batch):
            part = answers[start : start + batch]
            traces = [trace for answer in part if (trace := answer.trace) is not None]
            scores = score_tokens(
                loaded,
                [answer.sequence for answer in part],
                record=sparse,
                traces=traces if replay and sparse else None,
            )
            for answer, values in zip(part, scores.logprobs, strict=True):
                logprobs.append(values.detach()[len(answer.prompt) - 1 :])
            routes += scores.routes
    return logprobs, routes


def _several_ranks() -> bool:
    return parallel_state.get_tensor_model_parallel_world_size() > 1
