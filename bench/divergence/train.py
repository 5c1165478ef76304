"""Scores answers as a trainer does: one forward pass over whole sequences, gradients enabled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench.divergence.sample import Answer
from consistency import NumericsContract
from consistency.routing_replay import RoutingRecorder
from integrations.errors import BenchError
from integrations.trainer.model.config import ModelConfig

__all__ = ["TRAINERS", "Scores", "score"]

TRAINERS = ("transformers", "embedded", "megatron")


@dataclass(frozen=True, slots=True)
class Scores:
    """What a trainer makes of the answers.

    Attributes:
        logprobs: fp32 of every answer's tokens, ``[answer]`` each.
        routes: expert ids ``[tokens - 1, moe_layers, topk]`` of every answer; empty when dense.
    """

    logprobs: list[torch.Tensor]
    routes: list[torch.Tensor]


def score(
    trainer: str,
    model: str,
    answers: Sequence[Answer],
    operations: Sequence[str] | None,
    *,
    batch: int = 16,
    contract: NumericsContract | None = None,
    ranks: int = 1,
    replay: bool = False,
) -> Scores:
    """Scores answers with a trainer.

    Args:
        trainer: one of `TRAINERS`.
        model: checkpoint folder.
        answers: to score.
        operations: to route to the contract; None for the stock trainer.
        batch: sequences per pass.
        contract: of a trainer that is not stock; by default the contract of one rank.
        ranks: tensor-parallel ranks; of megatron only.
        replay: send tokens to the experts of the answers' traces; of megatron only.

    Raises:
        BenchError: a trainer that does not exist, is not installed, or cannot do as asked.
    """
    contract = contract or NumericsContract()
    if trainer not in TRAINERS:
        raise BenchError(f"trainer {trainer!r} does not exist: use one of {', '.join(TRAINERS)}")
    if trainer == "megatron":
        return _score_megatron(model, answers, operations, batch, contract, ranks, replay)
    if ranks != 1 or replay:
        raise BenchError(f"trainer {trainer!r} has one rank and replays nothing here: use megatron")
    if trainer == "transformers":
        return _score_transformers(model, answers, operations, batch, contract)
    return _score_embedded(model, answers, batch, contract)


def _recorder(config: ModelConfig) -> RoutingRecorder | None:
    if not config.moe_layers:
        return None
    return RoutingRecorder(config.moe_layers, config.experts, config.experts_per_token)


def _score_megatron(
    folder: str,
    answers: Sequence[Answer],
    operations: Sequence[str] | None,
    batch: int,
    contract: NumericsContract,
    ranks: int,
    replay: bool,
) -> Scores:
    try:
        from integrations.megatron.ranks import score_on_ranks
        from integrations.megatron.scoring import score_answers
    except ImportError as error:
        raise BenchError(
            f"trainer 'megatron' cannot be used here ({error}): pip install megatron-core==0.16.1"
        ) from error
    if ranks > 1:
        found = score_on_ranks(
            folder, answers, operations, ranks=ranks, contract=contract, replay=replay
        )
    else:
        found = score_answers(
            folder, answers, operations, contract=contract, replay=replay, batch=batch
        )
    return Scores(*found)


def _score_transformers(
    folder: str,
    answers: Sequence[Answer],
    operations: Sequence[str] | None,
    batch: int,
    contract: NumericsContract,
) -> Scores:
    from contextlib import nullcontext

    from transformers import AutoModelForCausalLM

    from integrations.transformers import OPERATIONS, patch, record_routes, score_tokens

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).train()
    if operations is not None:
        chosen = [name for name in operations if name in OPERATIONS]
        patch(model, contract=contract, operations=chosen)
    recorder = _recorder(ModelConfig.load(folder))
    logprobs: list[torch.Tensor] = []
    routes: list[torch.Tensor] = []
    for start in range(0, len(answers), batch):
        part = answers[start : start + batch]
        sequences = [answer.sequence for answer in part]
        with nullcontext() if recorder is None else record_routes(model, recorder):
            scored = score_tokens(model, sequences)
        for answer, values in zip(part, scored, strict=True):
            logprobs.append(values.detach()[len(answer.prompt) - 1 :])
        if recorder is not None:
            width = max(map(len, sequences))
            rows = recorder.take().to(torch.int64).unflatten(0, (len(part), width))
            routes += [rows[i, : len(s) - 1] for i, s in enumerate(sequences)]
    return Scores(logprobs, routes)


def _score_embedded(
    folder: str, answers: Sequence[Answer], batch: int, contract: NumericsContract
) -> Scores:
    from consistency import kernels
    from integrations.trainer.model.attention import VarlenAttention
    from integrations.trainer.model.checkpoint import load_checkpoint
    from integrations.trainer.model.decoder import Decoder
    from integrations.trainer.model.weights import lm_head_weight

    config, weights = load_checkpoint(folder)
    weights = {name: tensor.requires_grad_() for name, tensor in weights.items()}
    decoder, recorder = Decoder(config, contract), _recorder(config)
    logprobs: list[torch.Tensor] = []
    routes: list[torch.Tensor] = []
    for start in range(0, len(answers), batch):
        part = answers[start : start + batch]
        inputs = [answer.sequence[:-1] for answer in part]
        counts = torch.tensor([0, *map(len, inputs)])
        attention = VarlenAttention(counts.cumsum(0).to(torch.int32))
        hidden = decoder.forward(
            weights,
            torch.tensor([token for row in inputs for token in row]),
            torch.cat([torch.arange(len(row)) for row in inputs]),
            attention,
            recorder,
        )
        targets = torch.tensor([token for answer in part for token in answer.sequence[1:]])
        values, _ = kernels.lm_head_logprob(
            hidden, lm_head_weight(weights), targets, temperature=1.0
        )
        pieces = values.detach().split(counts[1:].tolist())
        logprobs += [v[len(a.prompt) - 1 :] for v, a in zip(pieces, part, strict=True)]
        if recorder is not None:
            routes += recorder.take().to(torch.int64).split(counts[1:].tolist())
    return Scores(logprobs, routes)
