"""`ContractSampler`: vLLM's sampler with the contract's log-probabilities and random numbers."""

# vLLM is installed beside the engine tests only.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from consistency import kernels
from integrations.vllm.operators import Operator

__all__ = ["ContractSampler"]

_GREEDY_BELOW = 1e-5  # vLLM's own threshold: lower temperatures mean the argmax
_INT64 = 1 << 64


class ContractSampler(Sampler):
    """A request's tokens depend on its seed and their positions, never on its slot in the batch.

    A request with a seed gets the very tokens that the embedded engine samples for that seed; a
    request without one gets a seed made from the engine's seed and its id. Every log-probability
    that is reported comes from `kernels.token_logprob`, whatever else is in the batch.

    Args:
        stock: vLLM's sampler, which this one replaces.
        runner: the model runner, whose batch says which request each row belongs to.
        operations: "logprobs" and "sampling", or one of them; the other stays vLLM's.
        engine_seed: of requests without a seed.
    """

    def __init__(
        self, stock: Sampler, runner: Any, operations: frozenset[str], engine_seed: int
    ) -> None:
        mode: Any = stock.logprobs_mode
        super().__init__(mode, stock.use_fp64_gumbel)
        self._runner = runner
        self._engine_seed = engine_seed
        self._exact_logprobs = "logprobs" in operations
        self._keyed_sampling = "sampling" in operations
        self.operators = [Operator(name, "sampler") for name in sorted(operations)]

    def forward(
        self,
        logits: torch.Tensor,
        sampling_metadata: Any,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> SamplerOutput:
        """See vLLM's `Sampler.forward`; logits are fp32 ``[requests, vocabulary]``."""
        for operator in self.operators:
            operator.fired = True
        mode = logprobs_mode_override or self.logprobs_mode
        wanted = sampling_metadata.max_num_logprobs is not None or bool(
            sampling_metadata.logprob_token_ids
        )
        logits = logits.float()
        raw = logits.clone() if wanted and mode.startswith("raw") else logits
        processed = self.apply_logits_processors(logits, sampling_metadata, predict_bonus_token)
        temperature = _temperatures(sampling_metadata, logits.shape[0])
        if self._keyed_sampling:
            processed = _masked(processed, temperature, sampling_metadata)
            seeds, positions = self._keys(logits.shape[0])
            sampled = kernels.sample(
                processed, temperature=temperature, seeds=seeds, positions=positions
            )
            # vLLM winds these back for partial prefills, which the CPU's generators cannot do.
            sampling_metadata.generators.clear()
        else:
            quiet = replace(sampling_metadata, max_num_logprobs=None, logprob_token_ids=None)
            sampled, _ = self.sample(processed.clone(), quiet)
            sampled = sampled.long()
        tensors = None
        if wanted:
            source, scale = (
                (raw, torch.ones_like(temperature))
                if mode.startswith("raw")
                else (processed, torch.where(temperature == 0, 1.0, temperature))
            )
            tensors = self._report(source, scale, sampled, sampling_metadata, mode)
        return SamplerOutput(
            sampled_token_ids=sampled.to(torch.int32).unsqueeze(-1), logprobs_tensors=tensors
        )

    def compute_logprobs(self, logits: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Logits: `gather_logprobs` turns the few that are wanted into log-probabilities.

        vLLM calls the two one after the other for the tokens of a prompt.
        """
        return logits.float() if self._exact_logprobs else Sampler.compute_logprobs(logits)

    def gather_logprobs(  # type: ignore[override]
        self, logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor
    ) -> LogprobsTensors:
        """See `compute_logprobs`, from which `logprobs` comes."""
        temperature = torch.ones(logprobs.shape[0])
        return self._gather(logprobs, temperature, num_logprobs, token_ids, self._exact_logprobs)

    def _report(
        self,
        source: torch.Tensor,
        temperature: torch.Tensor,
        sampled: torch.Tensor,
        metadata: Any,
        mode: str,
    ) -> LogprobsTensors:
        exact = mode.endswith("logprobs") and self._exact_logprobs
        if mode.endswith("logprobs") and not self._exact_logprobs:
            source = Sampler.compute_logprobs(source / temperature[:, None])
        if metadata.logprob_token_ids:
            return self._named(source, temperature, sampled, metadata.logprob_token_ids, exact)
        return self._gather(source, temperature, metadata.max_num_logprobs, sampled, exact)

    def _gather(
        self,
        source: torch.Tensor,
        temperature: torch.Tensor,
        count: int,
        token_ids: torch.Tensor,
        exact: bool,
    ) -> LogprobsTensors:
        """The given token of each row, and the `count` most probable ones."""
        best = source.topk(count, dim=-1).indices
        columns = torch.cat((token_ids[:, None], best), dim=1)
        values = _values(source, columns, temperature) if exact else source.gather(1, columns)
        # Ranks follow from the order of the logits, which is that of the log-probabilities.
        ranks = (source >= source.gather(1, token_ids[:, None])).sum(-1)
        return LogprobsTensors(columns.to(torch.int32), values, ranks)

    def _named(
        self,
        source: torch.Tensor,
        temperature: torch.Tensor,
        sampled: torch.Tensor,
        wanted: dict[int, list[int]],
        exact: bool,
    ) -> LogprobsTensors:
        """The given token of each row, and those that its request names."""
        width = 1 + max(len(ids) for ids in wanted.values())
        columns = torch.zeros((source.shape[0], width), dtype=torch.int64)
        present = torch.zeros(columns.shape, dtype=torch.bool)
        columns[:, 0], present[:, 0] = sampled, True
        for row, ids in wanted.items():
            columns[row, 1 : 1 + len(ids)] = torch.tensor(ids)
            present[row, 1 : 1 + len(ids)] = True
        values = _values(source, columns, temperature) if exact else source.gather(1, columns)
        ranks = (source >= source.gather(1, sampled[:, None])).sum(-1)
        return LogprobsTensors(
            columns.to(torch.int32), values.masked_fill(~present, float("-inf")), ranks
        )

    def _keys(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Seed and position of the token that each row of the batch samples."""
        batch = self._runner.input_batch
        if batch.num_reqs == 0:  # a profiling run has no requests
            return torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
        seeds = [self._seed(name) for name in batch.req_ids]
        # The tokens that a request has when this step's are computed: the index of the next.
        positions = self._runner.optimistic_seq_lens_cpu[:rows].to(torch.int64)
        return torch.tensor(seeds, dtype=torch.int64), positions

    def _seed(self, request: str) -> int:
        parameters = self._runner.requests[request].sampling_params
        seed = None if parameters is None else parameters.seed
        if seed is None:
            text = f"{self._engine_seed}:{request}".encode()
            seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        seed %= _INT64
        return seed - _INT64 if seed >= _INT64 // 2 else seed


def _temperatures(metadata: Any, rows: int) -> torch.Tensor:
    """fp32 ``[rows]``; 0 where the argmax is wanted."""
    if metadata.all_greedy or metadata.temperature is None:
        return torch.zeros(rows)
    temperature = metadata.temperature.float()
    return torch.where(temperature < _GREEDY_BELOW, 0.0, temperature)


def _masked(logits: torch.Tensor, temperature: torch.Tensor, metadata: Any) -> torch.Tensor:
    """Logits with -inf where min-p, top-k or top-p rule a token out; as they are without these."""
    processors = [
        processor
        for processor in metadata.logitsprocs.argmax_invariant
        if getattr(processor, "min_p_count", 1)
    ]
    if metadata.top_k is None and metadata.top_p is None and not processors:
        return logits
    scaled = logits / torch.where(temperature == 0, 1.0, temperature)[:, None]
    for processor in processors:
        scaled = processor.apply(scaled)
    scaled = apply_top_k_top_p(scaled, metadata.top_k, metadata.top_p)
    ruled_out = (scaled == float("-inf")) & (temperature > 0)[:, None]
    return logits.masked_fill(ruled_out, float("-inf"))


def _values(logits: torch.Tensor, columns: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """fp32 log-probabilities of the tokens `columns` ``[rows, n]`` under each row's temperature."""
    out = torch.empty(columns.shape, dtype=torch.float32)
    for value in temperature.unique().tolist():
        rows = (temperature == value).nonzero().flatten()
        whole = len(rows) == logits.shape[0]
        part = logits if whole else logits[rows]
        for column in range(columns.shape[1]):
            targets = columns[rows, column]
            out[rows, column], _ = kernels.token_logprob(part, targets, temperature=value)
    return out
