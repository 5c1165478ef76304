"""Does an engine's checkpoint hold the values that the trainer trained? Matrix by matrix.

Values are compared, not bytes: two encodings of one number (a scale twice as large and codes half
as large, zeros of either sign) compute the same. Where values differ, the audit tries what other
quantisers are known to do (`alternatives`) and other orders of nibbles and rows, and names the one
that explains every element.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from consistency.quant.alternatives import Alternative, alternatives, neighbours
from consistency.quant.formats import BLOCK
from consistency.quant.layouts import (
    EXPERT_MATRIX,
    CheckpointLayout,
    GateUp,
    is_quantisable,
    matrices_of,
)
from consistency.quant.mxfp4 import PackedTensor, pack, qdq, unpack
from consistency.quant.settings import QuantSettings

Status = Literal[
    "equal", "differs", "not packed", "packed", "damaged", "missing", "unknown", "not compared"
]
"""equal: every value. differs: some do not. not packed: dense in the engine, although the trainer
quantises it. packed: in the engine, although the trainer keeps it dense. damaged: a scale is NaN.
missing: in the trainer alone. unknown: in the engine alone. not compared: of a dtype other than
16- and 32-bit floats, or under names of the engine's own."""

_PASSING = ("equal", "not compared")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_DIAGNOSED_ROWS = 256


class Weights(Protocol):
    """What an audit asks of a side; `CheckpointReader` is one, `ModelWeights` another."""

    @property
    def packed_names(self) -> tuple[str, ...]: ...
    @property
    def dense_names(self) -> tuple[str, ...]: ...
    def codes_and_scales(self, name: str) -> tuple[torch.Tensor, torch.Tensor]: ...
    def dense(self, name: str) -> torch.Tensor: ...


class ModelWeights:
    """Weights in memory: of a trainer, packed or dense, stacked experts or matrices.

    Args:
        weights: by the names of transformers; float32 masters, bf16, or packed.
        gate_up: order of the rows of a stacked gate_up_proj.
    """

    def __init__(
        self, weights: Mapping[str, torch.Tensor | PackedTensor], *, gate_up: GateUp = "stacked"
    ) -> None:
        self._packed: dict[str, PackedTensor] = {}
        self._dense: dict[str, torch.Tensor] = {}
        for name, weight in weights.items():
            if isinstance(weight, PackedTensor):
                self._packed.update(matrices_of(name, weight, gate_up))
            else:
                self._dense.update(matrices_of(name, weight.detach(), gate_up))

    @property
    def packed_names(self) -> tuple[str, ...]:
        return tuple(self._packed)

    @property
    def dense_names(self) -> tuple[str, ...]:
        return tuple(self._dense)

    def codes_and_scales(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """See `CheckpointReader.codes_and_scales`."""
        return self._packed[name].codes, self._packed[name].scales

    def dense(self, name: str) -> torch.Tensor:
        """See `CheckpointReader.dense`."""
        return self._dense[name]


@dataclass(frozen=True, slots=True)
class MatrixAudit:
    """One matrix, or another tensor of the model.

    Args:
        name: as transformers names it.
        status: see `Status`.
        elements: of the engine's matrix, or of the trainer's where the engine has none.
        scales_differ: blocks whose scale bytes differ.
        codes_differ: elements whose 4-bit codes differ.
        values_differ: elements whose values differ.
        max_abs_diff: largest difference of two values.
        cause: what explains every difference; empty if nothing known does.
    """

    name: str
    status: Status
    elements: int = 0
    scales_differ: int = 0
    codes_differ: int = 0
    values_differ: int = 0
    max_abs_diff: float = 0.0
    cause: str = ""

    @property
    def passed(self) -> bool:
        """Whether the engine computes with the trainer's values."""
        return self.status in _PASSING


def audit(
    engine: Weights,
    trainer: Weights,
    settings: QuantSettings,
    *,
    targets: Literal["experts", "linears"] | None = None,
    exclude: Collection[str] = (),
    engine_layout: CheckpointLayout | None = None,
) -> Iterator[MatrixAudit]:
    """Compares every matrix of both sides.

    Args:
        engine: what the engine loads.
        trainer: what was trained: packed, or dense (masters, or values of a QDQ), which is then
            quantised by `settings`.
        settings: the trainer's quantiser.
        targets: which matrices the trainer quantises, if its own weights are dense, see
            `is_quantisable`. By default, those that the engine packs.
        exclude: names of targets that the trainer keeps dense.
        engine_layout: deepseek-v4 names everything but experts itself; those are not compared.

    Yields:
        One record per matrix, the engine's first.

    Raises:
        InvalidInputError: a trainer's weight that cannot be quantised, NaN for instance.
    """
    own_names = engine_layout is CheckpointLayout.DEEPSEEK_V4
    trained = _Trained(trainer, settings, targets, frozenset(exclude))
    served = (*engine.packed_names, *engine.dense_names)
    for name in engine.packed_names:
        codes, scales = engine.codes_and_scales(name)
        if name not in trained.names:
            yield MatrixAudit(name, "unknown", 2 * codes.numel())
        elif trained.quantises(name) is False:
            yield MatrixAudit(name, "packed", 2 * codes.numel(), cause="the trainer's is dense")
        else:
            yield _packed(name, PackedTensor(codes, scales, settings), trained)
    for name in engine.dense_names:
        if name in trained.names:
            yield _dense(name, engine.dense(name), trained)
        else:
            elements = engine.dense(name).numel()
            yield MatrixAudit(name, "not compared" if own_names else "unknown", elements)
    for name in sorted(trained.names - set(served)):
        expert = name in trained.packed or EXPERT_MATRIX.fullmatch(name)
        yield MatrixAudit(name, "missing" if expert or not own_names else "not compared")


def check_packed(engine: Weights) -> Iterator[MatrixAudit]:
    """The packed matrices of a checkpoint by themselves: whether all scales are numbers."""
    for name in engine.packed_names:
        codes, scales = engine.codes_and_scales(name)
        broken = int((scales == 255).sum())
        status: Status = "damaged" if broken else "equal"
        cause = f"{broken} scale bytes are 255, which is NaN" if broken else ""
        yield MatrixAudit(name, status, 2 * codes.numel(), broken, cause=cause)


class _Trained:
    """The trainer's side: its weights, which of them it quantises, and how."""

    def __init__(
        self,
        weights: Weights,
        settings: QuantSettings,
        targets: Literal["experts", "linears"] | None,
        exclude: frozenset[str],
    ) -> None:
        self.settings = settings
        self.packed = frozenset(weights.packed_names)
        self.names = self.packed | frozenset(weights.dense_names)
        self._weights, self._exclude = weights, exclude
        self._targets: Literal["experts", "linears"] | None = targets

    def quantises(self, name: str) -> bool | None:
        """Whether the trainer quantises a matrix; None if nobody says."""
        if self.packed or self._targets is None:
            return name in self.packed if self.packed else None
        shape = tuple(self._weights.dense(name).shape)
        return name not in self._exclude and is_quantisable(name, shape, self._targets)

    def dense(self, name: str) -> torch.Tensor | None:
        """A weight before quantisation; None if the trainer's is packed."""
        return None if name in self.packed else self._weights.dense(name)

    def quantised(self, name: str) -> PackedTensor:
        """A matrix as the trainer quantises it."""
        source = self.dense(name)
        if source is None:
            return PackedTensor(*self._weights.codes_and_scales(name), self.settings)
        return pack(source, self.settings, name=name)

    def values(self, name: str) -> torch.Tensor:
        """float32 [out, in]: what the trainer computes with."""
        return unpack(self.quantised(name), dtype=torch.float32)


def _dense(name: str, theirs: torch.Tensor, trained: _Trained) -> MatrixAudit:
    source = trained.dense(name)
    quantises = trained.quantises(name)
    if theirs.dtype not in _FLOATS or (source is not None and source.dtype not in _FLOATS):
        return MatrixAudit(name, "not compared", theirs.numel())
    ours = trained.values(name) if source is None or quantises else source
    if theirs.shape != ours.shape:
        return _other_shape(name, theirs.shape, ours.shape)
    ours, theirs = ours.to(theirs.dtype).double(), theirs.double()
    differ = int((ours != theirs).sum())
    if not differ:
        return MatrixAudit(name, "equal", theirs.numel())
    largest = float((ours - theirs).abs().max())
    status: Status = "not packed" if quantises else "differs"
    cause = "left out of quantisation" if quantises else ""
    return MatrixAudit(name, status, theirs.numel(), 0, 0, differ, largest, cause)


def _packed(name: str, theirs: PackedTensor, trained: _Trained) -> MatrixAudit:
    elements = theirs.shape.numel()
    broken = int((theirs.scales == 255).sum())
    if broken:
        cause = f"{broken} scale bytes are 255, which is NaN"
        return MatrixAudit(name, "damaged", elements, broken, cause=cause)
    source = trained.dense(name)
    if source is not None and source.shape != theirs.shape:
        return _other_shape(name, theirs.shape, source.shape)
    ours = trained.quantised(name)
    if ours.shape != theirs.shape:
        return _other_shape(name, theirs.shape, ours.shape)
    our_values, their_values = (unpack(side, dtype=torch.float32) for side in (ours, theirs))
    differ = int((our_values != their_values).sum())
    unequal = ours.codes ^ theirs.codes
    counts = (
        int((ours.scales != theirs.scales).sum()),
        int((unequal & 15).ne(0).sum() + (unequal >> 4).ne(0).sum()),
        differ,
    )
    if not differ:
        return MatrixAudit(name, "equal", elements, *counts)
    largest = float((our_values.double() - their_values.double()).abs().max())
    cause = _cause(name, theirs, their_values, our_values, trained)
    return MatrixAudit(name, "differs", elements, *counts, largest, cause)


def _cause(
    name: str,
    theirs: PackedTensor,
    their_values: torch.Tensor,
    our_values: torch.Tensor,
    trained: _Trained,
) -> str:
    """The first known cause that explains every value; empty if none does."""
    settings = trained.settings
    swapped = (theirs.codes << 4) | (theirs.codes >> 4)
    unswapped = unpack(PackedTensor(swapped, theirs.scales, settings), dtype=torch.float32)
    if torch.equal(unswapped, our_values):
        return "nibbles in the other order: the even index is in the high one"
    rows = _row_order(name, their_values, trained)
    source = trained.dense(name)
    if rows or source is None:
        return rows
    # A cause explains all rows or none; some are enough to tell, whole blocks of them for an axis.
    count = min(_DIAGNOSED_ROWS, source.shape[0] // BLOCK * BLOCK or source.shape[0])
    part, found = source[:count], their_values[:count]
    if torch.equal(part.float(), found):
        return "the engine holds the trainer's weight as it is, not its QDQ"
    corner = (slice(BLOCK), slice(8 * BLOCK))
    for alternative in alternatives(settings, square=count % BLOCK == 0):
        if _explains(alternative, part[corner], found[corner], settings) and _explains(
            alternative, part, found, settings
        ):
            return alternative.difference(settings)
    lower, upper = neighbours(part, settings)
    if bool(((found == lower) | (found == upper)).all()):
        return "each value is a neighbour under the right scales: stochastic or another rounding"
    return ""


def _explains(
    alternative: Alternative, part: torch.Tensor, found: torch.Tensor, settings: QuantSettings
) -> bool:
    values = alternative.qdq(part)
    if alternative.axis == -2:
        # Blocks of the other axis have no place in a checkpoint: they were quantised again.
        values = qdq(values, settings)
    return torch.equal(values, found)


def _row_order(name: str, their_values: torch.Tensor, trained: _Trained) -> str:
    """Whether gate and up rows were exchanged, or mixed up as stacked for interleaved."""
    match = EXPERT_MATRIX.fullmatch(name)
    if match is None or match[3] == "down_proj":
        return ""
    stem, first = f"{match[1]}.{match[2]}", match[3] == "gate_proj"
    names = [f"{stem}.{side}.weight" for side in ("gate_proj", "up_proj")]
    if not set(names) <= trained.names:
        return ""
    gate, up = map(trained.values, names)
    if torch.equal(their_values, up if first else gate):
        return "gate and up are exchanged"
    stacked, taken = torch.cat((gate, up)), torch.stack((gate, up), 1).flatten(0, 1)
    if torch.equal(their_values, stacked[0 if first else 1 :: 2]):
        return "gate_up_proj is stacked where the engine reads interleaved rows"
    half = len(gate)
    if torch.equal(their_values, taken[:half] if first else taken[half:]):
        return "gate_up_proj is interleaved where the engine reads stacked rows"
    return ""


def _other_shape(name: str, theirs: torch.Size, ours: torch.Size) -> MatrixAudit:
    cause = f"the engine's shape is {tuple(theirs)}, the trainer's {tuple(ours)}"
    if tuple(theirs) == tuple(reversed(ours)):
        cause += ": transposed"
    elements = theirs.numel()
    return MatrixAudit(name, "differs", elements, values_differ=elements, cause=cause)
