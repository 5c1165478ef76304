"""``GenerationRequest`` and ``Trajectory``: what goes into a rollout engine and what comes out.

Row and token
    *Row* ``r`` is the forward pass of the token at position ``r``: it writes the keys, the values
    and the expert ids of that position, and its logits are the distribution of token ``r + 1``.
    A trajectory of ``n`` tokens therefore has ``n - 1`` rows: the last token was never an input.

Build log
    ``Trajectory.segments`` lists, in the order in which it happened, which rows of the KV cache
    were built under which weight version. Without a re-prefill the entries do not overlap. After
    one (preemption, or a swap with ``re_prefill``) a later entry covers rows that an earlier entry
    had built; both stay in the log, because the tokens sampled in between have seen the earlier
    ones. The logprob of token ``r + 1`` belongs to the **first** entry that covers row ``r``.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from typing import Literal, get_args

import msgspec

from consistency.routing_replay import Origin, RoutingTrace, Segment
from integrations.errors import RequestError, TrajectoryError

__all__ = ["FinishReason", "GenerationRequest", "Segment", "Trajectory"]

FinishReason = Literal["stop", "length", "aborted"]

_SCHEMA = 1
_MAGIC = b"LSTJ"


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sampled continuation that an engine is asked for.

    Attributes:
        request_id: unique among the requests an engine holds.
        prompt: token ids, at least one.
        max_new_tokens: at least one.
        temperature: 0 takes the most probable token; otherwise logits are divided by it.
        seed: randomness of this request; token ``t`` is drawn with the key ``(seed, t)``.
        stop_token_ids: generation ends after any of these (the token is part of the response).
        record_routing: return the expert ids of every row (MoE models only).
        prompt_index, sample_index: copied into the trajectory; the engine does not read them.
    """

    request_id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    seed: int
    stop_token_ids: tuple[int, ...] = ()
    record_routing: bool = True
    prompt_index: int = 0
    sample_index: int = 0

    def __post_init__(self) -> None:
        if not self.request_id:
            raise RequestError("request_id is empty; give every request a unique id")
        where = f"request {self.request_id!r}"
        if not self.prompt:
            raise RequestError(f"{where}: prompt is empty; give at least one token id")
        if min(self.prompt) < 0:
            raise RequestError(f"{where}: prompt holds the negative token id {min(self.prompt)}")
        if self.max_new_tokens < 1:
            raise RequestError(
                f"{where}: max_new_tokens is {self.max_new_tokens}; ask for at least 1"
            )
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise RequestError(
                f"{where}: temperature is {self.temperature}; use 0 (greedy) or a positive number"
            )
        if not -(2**63) <= self.seed < 2**63:
            raise RequestError(f"{where}: seed {self.seed} does not fit a signed 64-bit integer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """A finished or aborted generation with everything a learner needs to train on it.

    Attributes:
        token_ids: prompt followed by response.
        prompt_length: number of prompt tokens, at least 1.
        logprobs: fp32 logprob of each response token under ``temperature`` (under temperature 1
            if ``temperature`` is 0), on the very logits it was sampled from.
        versions: weight version that sampled each response token.
        loss_mask: one per token; 0 on the prompt, 1 on the response tokens that are trained on.
        temperature: sampling temperature.
        segments: the build log of the KV cache (module docstring).
        routing: expert ids of the ``len(token_ids) - 1`` rows, or None. Each row holds the ids of
            the pass that produced its logprob, so routes and logprobs always belong together; a
            row whose KV was rebuilt later has the origin ``re_prefilled`` in ``routing.segments``
            while ``segments`` says under which versions that happened.
        contract_digest: digest of the engine's ``NumericsContract``.
        finish_reason: ``stop``, ``length`` or ``aborted``.
        reward: set by the scorer of the task.
    """

    request_id: str
    prompt_index: int
    sample_index: int
    token_ids: tuple[int, ...]
    prompt_length: int
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    loss_mask: tuple[int, ...]
    temperature: float
    contract_digest: str
    finish_reason: FinishReason
    segments: tuple[Segment, ...] = ()
    routing: RoutingTrace | None = None
    reward: float | None = None

    def __post_init__(self) -> None:
        where = f"trajectory {self.request_id!r}"
        tokens, prompt = len(self.token_ids), self.prompt_length
        if not 1 <= prompt <= tokens:
            raise TrajectoryError(f"{where}: prompt_length is {prompt} of {tokens} tokens")
        response = tokens - prompt
        for name, values in (("logprobs", self.logprobs), ("versions", self.versions)):
            if len(values) != response:
                raise TrajectoryError(
                    f"{where}: {name} has {len(values)} entries for {response} response tokens"
                )
        if len(self.loss_mask) != tokens:
            raise TrajectoryError(
                f"{where}: loss_mask has {len(self.loss_mask)} entries for {tokens} tokens"
            )
        if any(self.loss_mask[:prompt]) or any(m not in (0, 1) for m in self.loss_mask):
            raise TrajectoryError(f"{where}: loss_mask must be 0 on the prompt and 0 or 1 after it")
        for index, value in enumerate(self.logprobs):
            # A missing logprob must never look like a certain token, so NaN and inf stop here.
            if not (math.isfinite(value) and value <= 0.0):
                raise TrajectoryError(
                    f"{where}: logprob {index} is {value}, not a finite value <= 0"
                )
        if any(version < 0 for version in self.versions):
            raise TrajectoryError(f"{where}: versions holds a negative weight version")
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise TrajectoryError(f"{where}: temperature is {self.temperature}")
        if self.finish_reason not in get_args(FinishReason):
            raise TrajectoryError(f"{where}: finish_reason is {self.finish_reason!r}")
        if self.routing is not None and self.routing.tokens != tokens - 1:
            raise TrajectoryError(
                f"{where}: routing has {self.routing.tokens} rows for {tokens} tokens; "
                f"it must have {tokens - 1} (the last token is never an input)"
            )
        self._validate_segments(where)

    def _validate_segments(self, where: str) -> None:
        """Every response token carries the version that first built the row it was sampled from."""
        if not self.segments:
            return
        rows = len(self.token_ids) - 1
        first_version: list[int | None] = [None] * rows
        for segment in self.segments:
            if not 0 <= segment.start < segment.stop <= rows:
                raise TrajectoryError(
                    f"{where}: segment [{segment.start}, {segment.stop}) is not within {rows} rows"
                )
            for row in range(segment.start, segment.stop):
                if first_version[row] is None:
                    first_version[row] = segment.weight_version
        for index, version in enumerate(self.versions):
            built = first_version[self.prompt_length - 1 + index]
            if built != version:
                raise TrajectoryError(
                    f"{where}: response token {index} is tagged with version {version}, but "
                    f"segments say that its row was first built under {built}"
                )

    @property
    def response_ids(self) -> tuple[int, ...]:
        """Token ids of the response."""
        return self.token_ids[self.prompt_length :]

    def with_reward(self, reward: float) -> Trajectory:
        """The same trajectory carrying ``reward``."""
        return replace(self, reward=float(reward))

    def to_bytes(self) -> bytes:
        """Self-describing bytes: magic, schema number, msgpack body; logprobs as fp32."""
        wire = _Wire(
            request_id=self.request_id,
            prompt_index=self.prompt_index,
            sample_index=self.sample_index,
            token_ids=self.token_ids,
            prompt_length=self.prompt_length,
            logprobs=struct.pack(f"<{len(self.logprobs)}f", *self.logprobs),
            versions=self.versions,
            loss_mask=bytes(self.loss_mask),
            temperature=self.temperature,
            contract_digest=self.contract_digest,
            finish_reason=self.finish_reason,
            segments=tuple((s.start, s.stop, s.weight_version, s.origin) for s in self.segments),
            routing=None if self.routing is None else self.routing.to_bytes(),
            reward=self.reward,
        )
        return _MAGIC + bytes([_SCHEMA]) + msgspec.msgpack.encode(wire)

    @classmethod
    def from_bytes(cls, data: bytes) -> Trajectory:
        """Inverse of :meth:`to_bytes`.

        Raises:
            TrajectoryError: the bytes are not a trajectory, of another schema, or damaged.
        """
        if bytes(data[:4]) != _MAGIC:
            raise TrajectoryError("these bytes are not a trajectory (the first four do not match)")
        if len(data) < 5 or data[4] != _SCHEMA:
            found = data[4] if len(data) > 4 else "missing"
            raise TrajectoryError(f"trajectory schema is {found}; this release reads {_SCHEMA}")
        try:
            wire = msgspec.msgpack.decode(memoryview(data)[5:], type=_Wire)
        except msgspec.DecodeError as error:
            raise TrajectoryError(f"trajectory bytes are damaged: {error}") from error
        if len(wire.logprobs) % 4:
            raise TrajectoryError(
                f"trajectory logprobs have {len(wire.logprobs)} bytes, not 4 each"
            )
        return cls(
            request_id=wire.request_id,
            prompt_index=wire.prompt_index,
            sample_index=wire.sample_index,
            token_ids=wire.token_ids,
            prompt_length=wire.prompt_length,
            logprobs=struct.unpack(f"<{len(wire.logprobs) // 4}f", wire.logprobs),
            versions=wire.versions,
            loss_mask=tuple(wire.loss_mask),
            temperature=wire.temperature,
            contract_digest=wire.contract_digest,
            finish_reason=wire.finish_reason,
            segments=tuple(Segment(*entry) for entry in wire.segments),
            routing=None if wire.routing is None else RoutingTrace.from_bytes(wire.routing),
            reward=wire.reward,
        )


class _Wire(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The msgpack body of a trajectory."""

    request_id: str
    prompt_index: int
    sample_index: int
    token_ids: tuple[int, ...]
    prompt_length: int
    logprobs: bytes
    versions: tuple[int, ...]
    loss_mask: bytes
    temperature: float
    contract_digest: str
    finish_reason: FinishReason
    segments: tuple[tuple[int, int, int, Origin], ...]
    routing: bytes | None
    reward: float | None
