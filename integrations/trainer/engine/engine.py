"""``RolloutEngine``: continuous batching over a paged KV cache, one token boundary per step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

import numpy as np
import torch

from consistency import kernels
from consistency.contract import NumericsContract
from consistency.errors import InvalidInputError
from integrations.errors import IntegrationError, RequestError, SwapError
from integrations.trainer.engine.batch import PackedBatch
from integrations.trainer.engine.outputs import StepMetrics, StepOutput
from integrations.trainer.engine.requests import Place, RequestState, RequestTable, WeightSet
from integrations.trainer.engine.results import build_trajectory
from integrations.trainer.engine.routes import RouteStore
from integrations.trainer.engine.sampling import sample_tokens
from integrations.trainer.engine.scheduler import Scheduler
from integrations.trainer.model.attention import KeyValueCache
from integrations.trainer.model.config import ModelConfig
from integrations.trainer.model.decoder import Decoder
from integrations.trainer.model.weights import (
    EMBEDDING,
    Weight,
    dense,
    lm_head_weight,
    validate_weights,
)
from integrations.trainer.trajectory import FinishReason, GenerationRequest, Trajectory

__all__ = ["RolloutEngine", "SwapPolicy"]

SwapPolicy = Literal["continue_with_kv", "re_prefill", "finish_on_old"]


class RolloutEngine:
    """Generates continuations with per-token logprobs, weight versions and routes.

    What a request samples depends on its prompt, seed and temperature, on the weights, and on the
    contract; never on what else runs, on chunking, caching, interruption or preemption. The engine
    is single-threaded: every method is called between two steps, that is, at a token boundary.

    The weight tensors are used in place, not copied. They must not change while
    :attr:`versions_in_use` names their version.

    Args:
        config: shape of the model.
        contract: the numerics contract; its compute dtype must be that of the weights.
        weights: in-memory tensors (see ``tensor_shapes``).
        version: their weight version.
        blocks: blocks of the KV cache.
        block_size: tokens per block.
        max_running: most requests computed in one step.
        prefill_chunk: most rows of prefill in one step; longer prompts take several steps.

    Raises:
        CheckpointError: the weights do not fit the configuration.
        IntegrationError: a size is not positive, or the dtype contradicts the contract.
        UnsupportedError: the contract names a choice that the kernels do not have.
    """

    def __init__(
        self,
        config: ModelConfig,
        contract: NumericsContract,
        weights: Mapping[str, Weight],
        version: int,
        *,
        blocks: int,
        block_size: int = 16,
        max_running: int = 64,
        prefill_chunk: int = 512,
    ) -> None:
        sizes = {"blocks": blocks, "block_size": block_size, "max_running": max_running}
        for name, value in (sizes | {"prefill_chunk": prefill_chunk}).items():
            if value < 1:
                raise IntegrationError(f"{name} is {value}; it must be at least 1")
        if version < 0:
            raise IntegrationError(f"version is {version}; weight versions start at 0")
        validate_weights(config, weights)
        dtype = dense(weights, EMBEDDING).dtype
        if str(dtype) != f"torch.{contract.compute_dtype}":
            raise IntegrationError(
                f"the weights are {dtype}, but the contract computes in {contract.compute_dtype}"
            )
        self.config = config
        self.contract = contract
        self.metrics = StepMetrics()
        self._digest = contract.digest()
        self._block_size = block_size
        self._max_tokens = min(config.max_positions, blocks * block_size)
        self._prefill_chunk = prefill_chunk
        self._decoder = Decoder(config, contract, max_positions=self._max_tokens)
        self._weights = WeightSet(0, version, dict(weights))
        self._table = RequestTable(block_size)
        self._scheduler = Scheduler(self._table, blocks, block_size, max_running, self._before_drop)
        self._caches = [
            KeyValueCache.allocate(blocks, block_size, config.kv_heads, config.head_dim, dtype)
            for _ in range(config.layers)
        ]
        self._routes = (
            RouteStore(config, self._table, blocks, block_size) if config.moe_layers else None
        )
        self._states: dict[str, RequestState] = {}
        self._arrivals = 0
        self._undelivered: list[StepOutput] = []

    @property
    def version(self) -> int:
        """The weight version that new requests start on."""
        return self._weights.version

    @property
    def versions_in_use(self) -> tuple[int, ...]:
        """Versions whose tensors a later step may read: the newest, and those being finished."""
        held = {state.weights.version for state in self._states.values() if state.started}
        return tuple(sorted(held | {self._weights.version}))

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Requests that are waiting, running or paused, in order of arrival."""
        return tuple(self._states)

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return bool(self._scheduler.running or self._scheduler.waiting)

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: its id is in use, a token id is outside the vocabulary, or it can exceed
                the positions of the model or the blocks of the cache.
        """
        where = f"request {request.request_id!r}"
        if request.request_id in self._states:
            raise RequestError(f"{where} is already in this engine; use unique ids")
        vocabulary = self.config.vocab_size
        for name, ids in (("prompt", request.prompt), ("stop_token_ids", request.stop_token_ids)):
            if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
                wrong = max(ids) if max(ids) >= vocabulary else min(ids)
                raise RequestError(
                    f"{where}: {name} holds token id {wrong}; the vocabulary is 0..{vocabulary - 1}"
                )
        # The last token is sampled but never computed, so it needs no row in the cache.
        longest = len(request.prompt) + request.max_new_tokens - 1
        if longest > self._max_tokens:
            raise RequestError(
                f"{where}: {len(request.prompt)} prompt + {request.max_new_tokens} new tokens need "
                f"{longest} rows; the model and the cache allow {self._max_tokens}; "
                "shorten the request or give the engine more blocks"
            )
        row = self._table.add(request)
        state = RequestState(request, self._arrivals, row, self._weights)
        self._arrivals += 1
        self._states[request.request_id] = state
        self._scheduler.add(state)

    def step(self) -> list[StepOutput]:
        """Compute one batch: a token for every decoding request, and a bounded part of prefill.

        Returns:
            The tokens sampled, in order of admission. ``metrics`` describes the step.

        Raises:
            IntegrationError: the weights in use give NaN or infinity. The engine stays usable:
                swap to sound weights and step again.
        """
        started = time.perf_counter()
        scheduler = self._scheduler
        preemptions = scheduler.preemptions
        scheduler.grow()
        budget = self._prefill_chunk - int(self._prefill_demand(scheduler.running).sum())
        cached = scheduler.admit(budget)
        # Kept on the engine while the step runs: if one weight set fails, the tokens that another
        # has sampled before it are returned by the next step.
        outputs = self._undelivered
        prefilled = 0
        running = list(scheduler.running)
        demand = self._prefill_demand(running)
        before = np.cumsum(demand) - demand
        counts = np.where(demand > 0, np.clip(self._prefill_chunk - before, 0, demand), 1)
        for weights in dict.fromkeys(state.weights for state in running):
            chosen = [
                index
                for index, state in enumerate(running)
                if counts[index] and state.weights is weights
            ]
            if chosen:
                states = [running[index] for index in chosen]
                outputs.extend(self._compute(weights, states, counts[chosen]))
                prefilled += int(counts[chosen][demand[chosen] > 0].sum())
        self.metrics = StepMetrics(
            generated_tokens=len(outputs),
            prefill_tokens=prefilled,
            cache_hit_tokens=cached,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            paused=len(scheduler.paused),
            preemptions=scheduler.preemptions - preemptions,
            free_blocks=scheduler.available_blocks,
            seconds=time.perf_counter() - started,
        )
        self._undelivered = []
        return outputs

    def generate(self, requests: Iterable[GenerationRequest]) -> list[Trajectory]:
        """Submit ``requests`` and step until all of them are finished; results in their order.

        Raises:
            RequestError: as :meth:`submit`; requests before the refused one stay in the engine.
        """
        wanted = list(requests)
        for request in wanted:
            self.submit(request)
        results: dict[str, Trajectory] = {}
        while len(results) < len(wanted):
            for output in self.step():
                if output.trajectory is not None:
                    results[output.request_id] = output.trajectory
        return [results[request.request_id] for request in wanted]

    def interrupt(self, request_id: str) -> None:
        """Stop computing a request; its KV is kept until :meth:`resume`.

        If the cache runs full and nothing else can run, the KV of interrupted requests is given
        up, the latest first, and computed again after they resume (``re_prefilled``).

        Raises:
            RequestError: no such request, or it is interrupted already.
        """
        state = self._state(request_id)
        if state.place is Place.PAUSED:
            raise RequestError(f"request {request_id!r} is already interrupted")
        self._scheduler.pause(state)

    def resume(self, request_id: str) -> None:
        """Continue an interrupted request at the token where it stopped.

        Raises:
            RequestError: no such request, or it is not interrupted.
        """
        state = self._state(request_id)
        if state.place is not Place.PAUSED:
            raise RequestError(f"request {request_id!r} is not interrupted")
        self._scheduler.resume(state)

    def abort(self, request_id: str) -> Trajectory:
        """Remove a request; returns what it has generated so far.

        Raises:
            RequestError: no such request.
        """
        return self._finish(self._state(request_id), "aborted")

    def swap(
        self,
        weights: Mapping[str, Weight],
        version: int,
        policy: SwapPolicy = "continue_with_kv",
    ) -> None:
        """Use new weights from the next step on; a pointer swap, nothing is copied.

        The prefix cache is emptied under every policy: new requests share only what the new
        weights have built.

        Args:
            weights: same names, shapes and dtype as the present ones.
            version: their number; it differs from the present one, and may be lower (rollback).
            policy: for requests that have started. ``continue_with_kv``: they go on with the new
                weights over the KV they have. ``re_prefill``: their KV is dropped and computed
                again with the new weights. ``finish_on_old``: they finish with the weights they
                have, in the same steps as newer requests but in a forward pass of their own.

        Raises:
            SwapError: unknown policy or unusable version.
            CheckpointError: the weights do not fit; the old ones stay in use.
        """
        if policy not in get_args(SwapPolicy):
            known = ", ".join(get_args(SwapPolicy))
            raise SwapError(f"swap policy {policy!r} is unknown; use one of {known}")
        if version < 0 or version == self._weights.version:
            raise SwapError(f"version {version} cannot follow version {self._weights.version}")
        validate_weights(self.config, weights)
        if dense(weights, EMBEDDING).dtype != self._caches[0].keys.dtype:
            raise SwapError(
                f"the new weights are {dense(weights, EMBEDDING).dtype}, "
                f"the running ones {self._caches[0].keys.dtype}"
            )
        newest = WeightSet(self._weights.epoch + 1, version, dict(weights))
        for state in self._states.values():
            if policy == "finish_on_old" and state.started:
                continue
            if state.blocks and policy == "re_prefill":
                self._scheduler.drop_kv(state)
            elif state.blocks:
                state.note_rows(int(self._table.computed[state.row]))
                state.pure = False
            state.weights = newest
        self._weights = newest
        self._scheduler.forget_cached()

    def _state(self, request_id: str) -> RequestState:
        state = self._states.get(request_id)
        if state is None:
            raise RequestError(f"request {request_id!r} is not in this engine")
        return state

    def _prefill_demand(self, states: list[RequestState]) -> np.ndarray:
        """Rows that each request still needs, 0 where a single row gives the next token."""
        rows = Scheduler.rows(states)
        remaining = self._table.length[rows] - self._table.computed[rows]
        return np.where(remaining > 1, remaining, 0)

    @torch.inference_mode()
    def _compute(
        self, weights: WeightSet, states: list[RequestState], counts: np.ndarray
    ) -> list[StepOutput]:
        """One forward pass; sampling for the requests that have all their rows afterwards."""
        table, size = self._table, self._block_size
        rows = Scheduler.rows(states)
        ends = table.computed[rows] + counts
        complete = np.flatnonzero(ends == table.length[rows])
        batch = PackedBatch.pack(table, rows, counts, size)
        sampling = [states[index] for index in complete]
        try:
            tokens, logprobs = self._forward(weights, batch, rows, complete)
        except InvalidInputError as error:
            if self._routes is not None:
                self._routes.recorder.discard()
            ids = ", ".join(repr(state.request.request_id) for state in sampling[:3])
            raise IntegrationError(
                f"weight version {weights.version} gives numbers that nothing can be sampled from "
                f"(requests {ids}, ...): {error}; swap to sound weights with re_prefill"
            ) from error
        # Only now does the step change anything, so a failed one can be repeated after a swap.
        if self._routes is not None:
            self._routes.store(batch.slots)
        crossed = np.flatnonzero(ends // size > table.computed[rows] // size)
        table.computed[rows] = ends
        self._scheduler.publish([states[index] for index in crossed])
        rows = rows[complete]
        positions = table.length[rows]
        table.tokens[rows, positions] = tokens
        table.logprobs[rows, positions] = logprobs
        table.versions[rows, positions] = weights.version
        table.length[rows] += 1
        stopped = (table.stops[rows] == tokens[:, None]).any(axis=1)
        ended = stopped | (table.length[rows] >= table.limit[rows])
        outputs: list[StepOutput] = []
        for state, token, logprob, stop, end in zip(
            sampling, tokens.tolist(), logprobs.tolist(), stopped, ended, strict=True
        ):
            result = self._finish(state, "stop" if stop else "length") if end else None
            outputs.append(
                StepOutput(state.request.request_id, token, logprob, weights.version, result)
            )
        return outputs

    def _forward(
        self, weights: WeightSet, batch: PackedBatch, rows: np.ndarray, complete: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and logprobs of the requests at the indices ``complete`` of the batch."""
        hidden = self._decoder.forward(
            weights.tensors,
            torch.from_numpy(batch.token_ids),
            torch.from_numpy(batch.positions),
            batch.attention(self._caches),
            None if self._routes is None else self._routes.recorder,
        )
        last = torch.from_numpy(batch.query_starts[1:][complete].astype(np.int64) - 1)
        logits = kernels.lm_head_logits(hidden[last], lm_head_weight(weights.tensors))
        table, rows = self._table, rows[complete]
        tokens, logprobs = sample_tokens(
            logits, table.temperature[rows], table.seed[rows], table.length[rows]
        )
        if not np.isfinite(logprobs).all():
            raise InvalidInputError("the logits of a sampled token are infinite")
        return tokens, logprobs

    def _before_drop(self, state: RequestState) -> None:
        """Keep what the trajectory needs of a KV that is given up."""
        state.note_rows(int(self._table.computed[state.row]))
        if self._routes is not None:
            self._routes.keep(state)

    def _finish(self, state: RequestState, reason: FinishReason) -> Trajectory:
        """Build the trajectory and free everything the request held."""
        if state.blocks:
            state.note_rows(int(self._table.computed[state.row]))
        routing = None
        if self._routes is not None and state.request.record_routing:
            routing = self._routes.trace(state)
        trajectory = build_trajectory(self._table, state, routing, self._digest, reason)
        self._scheduler.remove(state)
        self._table.remove(state.row)
        del self._states[state.request.request_id]
        return trajectory
