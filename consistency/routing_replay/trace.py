"""`RoutingTrace`: which experts every token of a sequence was sent to, and under which weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from consistency.errors import RoutingTraceError
from consistency.routing_replay.encoding import decode, digest, encode
from consistency.routing_replay.expert_ids import expert_dtype, narrow, require_routable
from consistency.routing_replay.segment import Origin, Segment, append_segment


@dataclass(frozen=True, slots=True, eq=False)
class RoutingTrace:
    """Expert ids of every token in every MoE layer; checked as a whole when it is made.

    The tensors belong to the trace: do not write to them afterwards.

    Args:
        expert_ids: ``[tokens, moe_layers, topk]`` in the smallest unsigned dtype (uint8 up to 256
            experts, else uint16); slot order as routed. Logical ids, before any load balancing.
        layers: decoder layer index of each row of ``moe_layers``, increasing.
        experts: number of experts, 1 to 65536.
        valid: bool ``[tokens]``. False = the engine never routed this token (the last sampled token
            is never fed back, for one); its ids mean nothing and replay uses the live router.
        segments: in token order, without overlap, covering every valid token.

    Raises:
        RoutingTraceError: shapes or dtypes that do not fit, an id out of range or twice in one row,
            segments that overlap or leave a valid token out.
    """

    expert_ids: Tensor
    layers: tuple[int, ...]
    experts: int
    valid: Tensor
    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        require_layers(self.layers)
        require_shape(self.expert_ids, self.layers, self.experts)
        require_valid(self.valid, self.tokens)
        self._require_segments()
        require_routable(self.expert_ids, self.valid, self.experts)

    @classmethod
    def of(
        cls,
        expert_ids: Tensor,
        *,
        layers: Sequence[int],
        experts: int,
        weight_version: int,
        origin: Origin,
        valid: Tensor | None = None,
    ) -> RoutingTrace:
        """One segment from ids of any integer dtype; checked before they are narrowed.

        Args:
            expert_ids: ``[tokens, moe_layers, topk]``.
            layers, experts: as in `RoutingTrace`.
            weight_version, origin: of all tokens.
            valid: bool ``[tokens]``; None = all. Ids of the other tokens are set to 0.
        """
        tokens = expert_ids.shape[0] if expert_ids.dim() else 0
        if valid is None:
            valid = torch.ones(tokens, dtype=torch.bool, device=expert_ids.device)
        require_valid(valid, tokens)
        cleared = torch.where(
            valid.reshape(-1, *[1] * (expert_ids.dim() - 1)),
            expert_ids,
            torch.zeros_like(expert_ids),
        )
        segments = (Segment(0, tokens, weight_version, origin),) if tokens else ()
        return cls(narrow(cleared, experts), tuple(layers), experts, valid, segments)

    @property
    def tokens(self) -> int:
        """Number of tokens, the invalid ones included."""
        return self.expert_ids.shape[0]

    @property
    def topk(self) -> int:
        """Experts per token and layer."""
        return self.expert_ids.shape[2]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RoutingTrace):
            return NotImplemented
        return (
            self.layers == other.layers
            and self.experts == other.experts
            and self.segments == other.segments
            and torch.equal(self.valid, other.valid)
            and torch.equal(self.expert_ids, other.expert_ids)
        )

    # Tensors do not hash by content; use digest() where a key is wanted.
    __hash__ = None  # type: ignore[assignment]

    def tokens_of(self, origin: Origin) -> int:
        """Tokens in segments of this origin. Any ``re_prefilled`` token warns that no single
        routing reproduces the log-probabilities of the tokens generated before it."""
        return sum(part.stop - part.start for part in self.segments if part.origin == origin)

    def weight_versions(self) -> tuple[int, ...]:
        """The weight versions that routed this sequence, increasing, each once."""
        return tuple(sorted({part.weight_version for part in self.segments}))

    def slice(self, start: int, stop: int) -> RoutingTrace:
        """Tokens start .. stop - 1 as a trace of their own.

        Raises:
            RoutingTraceError: not 0 <= start <= stop <= tokens.
        """
        if not 0 <= start <= stop <= self.tokens:
            raise RoutingTraceError(
                f"slice {start}:{stop} of a trace of {self.tokens} tokens: stay inside it"
            )
        parts = (part.cut(start, stop) for part in self.segments)
        return replace(
            self,
            expert_ids=self.expert_ids[start:stop],
            valid=self.valid[start:stop],
            segments=tuple(part.moved(-start) for part in parts if part is not None),
        )

    def extended(self, expert_ids: Tensor, *, weight_version: int, origin: Origin) -> RoutingTrace:
        """This trace with more tokens after it. One step at a time, use `RoutingTraceBuilder`.

        Args:
            expert_ids: any integer dtype, ``[new tokens, moe_layers, topk]``.
            weight_version, origin: of the new tokens.
        """
        more = RoutingTrace.of(
            expert_ids,
            layers=self.layers,
            experts=self.experts,
            weight_version=weight_version,
            origin=origin,
        )
        return concatenate((self, more))

    def padded(self, tokens: int) -> RoutingTrace:
        """This trace with invalid tokens after it, up to ``tokens``: those that the engine never
        routed. An invalid token takes the live router; it is never sent to expert 0.

        Raises:
            RoutingTraceError: the trace has more tokens than that.
        """
        if tokens < self.tokens:
            raise RoutingTraceError(
                f"trace has {self.tokens} tokens, more than the {tokens} asked for: "
                "rows of the same tokens were recorded twice, or it belongs to another sequence"
            )
        missing = tokens - self.tokens
        rows = self.expert_ids.new_zeros((missing, *self.expert_ids.shape[1:]))
        return replace(
            self,
            expert_ids=torch.cat((self.expert_ids, rows)),
            valid=torch.cat((self.valid, self.valid.new_zeros(missing))),
        )

    def to_bytes(self) -> bytes:
        """Self-describing bytes; see `consistency.routing_replay.encoding`."""
        return encode(self.expert_ids, self.layers, self.experts, self.valid, self.segments)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> RoutingTrace:
        """Reads `to_bytes`.

        Raises:
            RoutingTraceError: not a trace, another schema, truncated, or corrupt.
        """
        return cls(*decode(data))

    def digest(self) -> str:
        """32 hexadecimal digits of blake2b over the encoded trace."""
        return digest(self.expert_ids, self.layers, self.experts, self.valid, self.segments)

    def _require_segments(self) -> None:
        reached = 0
        covered = torch.zeros_like(self.valid)
        for part in self.segments:
            if part.start < reached:
                raise RoutingTraceError(
                    f"segment {part.start}:{part.stop} starts before token {reached}, the end of "
                    "the one before: replace rows that are computed again, do not add them"
                )
            reached = part.stop
            covered[part.start : part.stop] = True
        if reached > self.tokens:
            raise RoutingTraceError(
                f"segments reach token {reached}, but the trace has {self.tokens} tokens: "
                "too few rows"
            )
        bare = self.valid & ~covered
        if bool(bare.any()):
            raise RoutingTraceError(
                f"token {int(bare.nonzero()[0])} is valid but in no segment: "
                "say which weight version routed it, or mark it invalid"
            )


def concatenate(traces: Sequence[RoutingTrace]) -> RoutingTrace:
    """Traces of consecutive tokens as one; adjacent segments that say the same are merged.

    Rows are never overwritten here: tokens that were computed again must replace their rows, which
    is what `RoutingTraceBuilder` does.

    Raises:
        RoutingTraceError: no trace, or traces of different models.
    """
    if not traces:
        raise RoutingTraceError("no traces to concatenate: pass at least one")
    first = traces[0]
    segments: list[Segment] = []
    offset = 0
    for index, trace in enumerate(traces):
        for name in ("layers", "experts", "topk"):
            if getattr(trace, name) != getattr(first, name):
                raise RoutingTraceError(
                    f"trace {index} has {name} {getattr(trace, name)}, trace 0 has "
                    f"{getattr(first, name)}: concatenate traces of one model"
                )
        for part in trace.segments:
            append_segment(segments, part.moved(offset))
        offset += trace.tokens
    return RoutingTrace(
        expert_ids=torch.cat([trace.expert_ids for trace in traces]),
        layers=first.layers,
        experts=first.experts,
        valid=torch.cat([trace.valid for trace in traces]),
        segments=tuple(segments),
    )


def require_layers(layers: tuple[int, ...]) -> None:
    """Layer indices must be integers >= 0, increasing."""
    if not isinstance(layers, tuple) or any(type(layer) is not int for layer in layers):
        raise RoutingTraceError(f"layers is {layers!r}: use a tuple of decoder layer indices")
    if any(layer < 0 for layer in layers) or any(left >= right for left, right in pairwise(layers)):
        raise RoutingTraceError(f"layers is {layers!r}: use increasing indices >= 0")


def require_shape(expert_ids: Tensor, layers: tuple[int, ...], experts: int) -> None:
    """Dtype and shape of ids that are stored; nothing is converted here."""
    dtype = expert_dtype(experts)
    if not isinstance(expert_ids, Tensor) or expert_ids.dim() != 3:
        found = (
            list(expert_ids.shape) if isinstance(expert_ids, Tensor) else type(expert_ids).__name__
        )
        raise RoutingTraceError(f"expert_ids is {found}: use a tensor [tokens, moe_layers, topk]")
    if expert_ids.dtype != dtype:
        raise RoutingTraceError(
            f"expert_ids has dtype {expert_ids.dtype}: {experts} experts are stored as {dtype}; "
            "RoutingTrace.of converts"
        )
    if expert_ids.shape[1] != len(layers):
        raise RoutingTraceError(
            f"expert_ids {list(expert_ids.shape)} has {expert_ids.shape[1]} layers, but "
            f"{len(layers)} are named ({layers}): use [tokens, moe_layers, topk], MoE "
            "layers of this model only"
        )
    if not 1 <= expert_ids.shape[2] <= experts:
        raise RoutingTraceError(
            f"expert_ids has topk {expert_ids.shape[2]}: use 1 to the {experts} experts"
        )


def require_valid(valid: Tensor, tokens: int) -> None:
    """One bool per token."""
    if not isinstance(valid, Tensor) or valid.dtype != torch.bool or valid.shape != (tokens,):
        found = (
            f"{valid.dtype} {list(valid.shape)}"
            if isinstance(valid, Tensor)
            else type(valid).__name__
        )
        raise RoutingTraceError(f"valid is {found}: use one bool per token, [{tokens}]")
