"""`OfflineEngine`: one vLLM engine in this process, for measurements and for the trainer.

It reaches into the scheduler where vLLM has no public switch: how many tokens a step may hold, and
how many cache blocks are free. Both only change when things are computed, never what.
"""

# vLLM is installed beside the engine tests only.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from consistency.routing_replay import RoutingTrace
from integrations.errors import RequestError
from integrations.vllm.options import KEY, VllmOptions

__all__ = ["OfflineEngine", "Request", "Sample"]


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Args:
        name: unique in the engine's life.
        prompt: token ids.
        max_tokens: to sample; no token ends a request before.
        seed: of its random numbers; None leaves them to the engine.
        temperature: of the sampler.
    """

    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """What came of a request.

    Attributes:
        request: the request.
        tokens: sampled ids.
        logprobs: fp32 of each, as vLLM reports them.
        cached_tokens: of the prompt, found in the prefix cache.
        versions: weight version of each token, as vLLM stamps it.
        trace: of an MoE model when routes are recorded.
    """

    request: Request
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached_tokens: int
    versions: tuple[str, ...]
    trace: RoutingTrace | None = field(repr=False)

    @property
    def sequence(self) -> list[int]:
        """Prompt and answer."""
        return [*self.request.prompt, *self.tokens]


class OfflineEngine:
    """A vLLM engine on the CPU.

    Args:
        model: checkpoint folder.
        options: of the plugin; None for stock vLLM.
        dtype: of weights and activations.
        max_length: tokens of the longest sequence.
        max_running: requests at a time.
        cache_bytes: of the KV cache.
        block_size: tokens of a cache block, a multiple of 32.
        compiled: let stock vLLM compile the model; a configured engine never does.
        weights: receive weights from the plane.
    """

    def __init__(
        self,
        model: str | Path,
        options: VllmOptions | None,
        *,
        dtype: str = "bfloat16",
        max_length: int = 256,
        max_running: int = 16,
        cache_bytes: int = 1 << 27,
        block_size: int = 32,
        compiled: bool = False,
        weights: bool = False,
    ) -> None:
        # Read once by vLLM; the engine core must live in this process to be steered.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm import LLM

        extra: dict[str, Any] = {"dtype": dtype}
        if options is not None:
            extra["additional_config"] = {KEY: options.to_mapping()}
        if weights:
            extra["weight_transfer_config"] = {"backend": "lockstep"}
        self.options = options
        self.llm: Any = LLM(
            model=str(model),
            skip_tokenizer_init=True,
            enforce_eager=not compiled,
            max_model_len=max_length,
            max_num_seqs=max_running,
            kv_cache_memory_bytes=cache_bytes,
            block_size=block_size,
            enable_prefix_caching=True,
            disable_log_stats=True,
            **extra,
        )
        self.engine: Any = self.llm.llm_engine
        self.core: Any = self.engine.engine_core.engine_core

    @property
    def runner(self) -> Any:
        """vLLM's model runner."""
        return self.core.model_executor.driver_worker.worker.model_runner

    def close(self) -> None:
        """Shuts the engine down and frees its memory."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self.core.shutdown()
        del self.llm, self.engine, self.core
        cleanup_dist_env_and_memory()
        gc.collect()

    def generate(self, requests: Sequence[Request], *, stagger: int = 0) -> list[Sample]:
        """Runs requests to their ends.

        Args:
            requests: to run.
            stagger: steps between the arrivals of two requests; 0 = all at once.

        Returns:
            Samples in the order of the requests.
        """
        finished: dict[str, Any] = {}
        waiting = list(requests)
        if stagger == 0:
            while waiting:
                self.submit(waiting.pop(0))
        step = 0
        while len(finished) < len(requests):
            if waiting and step % stagger == 0:
                self.submit(waiting.pop(0))
            finished.update(self.step())
            step += 1
        return [self.sample(request, finished[request.name]) for request in requests]

    def submit(self, request: Request) -> None:
        """Adds one request."""
        from vllm import SamplingParams, TokensPrompt

        self.engine.add_request(
            request.name,
            TokensPrompt(prompt_token_ids=list(request.prompt)),
            SamplingParams(
                temperature=request.temperature,
                max_tokens=request.max_tokens,
                seed=request.seed,
                logprobs=0,
                ignore_eos=True,
                detokenize=False,
            ),
        )

    def step(self) -> dict[str, Any]:
        """One step; vLLM's outputs of the requests that ended in it."""
        return {out.request_id: out for out in self.engine.step() if out.finished}

    def sample(self, request: Request, output: Any) -> Sample:
        """A finished output of vLLM as a `Sample`."""
        answer = output.outputs[0]
        tokens = tuple(answer.token_ids)
        versions: list[str] = [""] * len(tokens)
        for span in answer.weight_versions or ():
            for index in range(span.start, min(span.end, len(tokens))):
                versions[index] = span.version
        return Sample(
            request,
            tokens,
            tuple(
                entry[token].logprob for token, entry in zip(tokens, answer.logprobs, strict=True)
            ),
            output.num_cached_tokens or 0,
            tuple(versions),
            self._trace(request.name),
        )

    def _trace(self, name: str) -> RoutingTrace | None:
        try:
            (encoded,) = self.core.collective_rpc("lockstep_routing_trace", args=(name,))
        except RequestError:
            return None
        return RoutingTrace.from_bytes(encoded)

    def forget_prefixes(self) -> None:
        """Empties the prefix cache."""
        self.core.scheduler.reset_prefix_cache(reset_running_requests=True)

    @contextmanager
    def chunks_of(self, tokens: int) -> Iterator[None]:
        """Steps hold at most `tokens` tokens, so that longer prompts are prefilled in chunks."""
        scheduler = self.core.scheduler
        before = scheduler.max_num_scheduled_tokens
        scheduler.max_num_scheduled_tokens = tokens
        try:
            yield
        finally:
            scheduler.max_num_scheduled_tokens = before

    @contextmanager
    def free_blocks(self, blocks: int) -> Iterator[None]:
        """Only so many cache blocks can be used, so that requests are preempted."""
        self.forget_prefixes()
        pool = self.core.scheduler.kv_cache_manager.block_pool
        taken = pool.get_new_blocks(max(0, pool.get_num_free_blocks() - blocks))
        try:
            yield
        finally:
            pool.free_blocks(taken)

    @contextmanager
    def counted_preemptions(self) -> Iterator[list[int]]:
        """A list of one number: preemptions inside the block so far."""
        scheduler = self.core.scheduler
        count, preempt = [0], scheduler._preempt_request

        def counting(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            return preempt(*args, **kwargs)

        scheduler._preempt_request = counting
        try:
            yield count
        finally:
            scheduler._preempt_request = preempt
