"""`NumericsContract`: every choice that decides a bit, in one frozen record with a digest.

A learner and a rollout engine compute the same number only if they make the same choices: where a
reduction is cut, in which precision it accumulates, when a value is rounded. The record names these
choices, travels with every trajectory as a digest, and lets either side refuse, by name, a peer
that chose otherwise. Equality of two contracts promises equality of bits on one device type;
nothing is promised between device types, which is why the device type is itself a field.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

import torch

from consistency.errors import ContractMismatchError, InvalidInputError, UnsupportedError

SCHEMA: Final = 1
"""Revision of this record's fields; a new field is a new schema."""

KERNELS_REVISION: Final = 2
"""Raised whenever a kernel changes in a way that may change one bit of its result."""

_COMPUTE_DTYPES: Final[dict[str, torch.dtype]] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}

# Choices of which this release knows exactly one: a record that names another is refused, never
# read as if it named this one.
_ONLY_CHOICE: Final[dict[str, str]] = {
    "device": "cpu",
    "accumulate_dtype": "float32",
    "router_dtype": "float32",
    "router_ties": "lowest_index",
    "residual": "rounded_before_norm",
    "logits_dtype": "float32",
    "temperature": "float32_before_log_sum_exp",
    "moe_combine": "float32_in_slot_order",
    "sampler": "gumbel_keyed_by_seed_and_position",
}

# What the kernels are compiled with. A record may name other values, so that a peer's can be read
# and the difference named; computing under them is refused (see `require_supported`).
_COMPILED_IN: Final[dict[str, int]] = {
    "matmul_chunk_granule": 64,
    "matmul_max_chunks": 8,
    "attention_block": 64,
    "row_lanes": 16,
    "kernels_revision": KERNELS_REVISION,
}

_POWERS_OF_TWO: Final = tuple(name for name in _COMPILED_IN if name != "kernels_revision")


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsContract:
    """The choices under which two processes compute equal bits.

    Args:
        device: device type; equality is promised within one type only.
        compute_dtype: dtype of weights and activations: bfloat16, float16 or float32.
        accumulate_dtype: dtype of every accumulator; each result is rounded once, at the end.
        tp_invariant: cut the K of a matmul into chunks joined by a fixed binary tree, so that every
            power-of-two tensor-parallel degree computes subtrees of the same tree.
        matmul_chunk_granule: a chunk's length is a multiple of this (see `matmul_chunks`).
        matmul_max_chunks: the most chunks that one K is cut into.
        attention_block: keys per block of the online softmax, at absolute positions.
        row_lanes: virtual lanes of every row reduction; lane l sums the elements l, l + lanes, ...
        router_dtype: dtype of the gate's logits and softmax.
        router_ties: which of two equal scores the top-k prefers.
        residual: the residual sum is rounded to ``compute_dtype`` before the norm reads it.
        logits_dtype: dtype of the LM head's logits.
        temperature: where the temperature is applied.
        moe_combine: how the outputs of a token's experts are added.
        sampler: what the sampler's randomness is keyed by; never the slot in the batch.
        kernels_revision: revision of the kernels that keep these choices.
        schema: revision of this record.

    Raises:
        InvalidInputError: a field has a wrong type or an impossible value.
        UnsupportedError: a field names a choice that this release does not implement.
    """

    device: str = "cpu"
    compute_dtype: str = "bfloat16"
    accumulate_dtype: str = "float32"
    tp_invariant: bool = False
    matmul_chunk_granule: int = _COMPILED_IN["matmul_chunk_granule"]
    matmul_max_chunks: int = _COMPILED_IN["matmul_max_chunks"]
    attention_block: int = _COMPILED_IN["attention_block"]
    row_lanes: int = _COMPILED_IN["row_lanes"]
    router_dtype: str = "float32"
    router_ties: str = "lowest_index"
    residual: str = "rounded_before_norm"
    logits_dtype: str = "float32"
    temperature: str = "float32_before_log_sum_exp"
    moe_combine: str = "float32_in_slot_order"
    sampler: str = "gumbel_keyed_by_seed_and_position"
    kernels_revision: int = KERNELS_REVISION
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if type(self.schema) is not int or self.schema != SCHEMA:
            raise UnsupportedError(
                f"contract schema is {self.schema!r}, this release reads schema {SCHEMA}: "
                "run the same release on both sides"
            )
        if self.compute_dtype not in _COMPUTE_DTYPES:
            raise UnsupportedError(
                f"contract compute_dtype is {self.compute_dtype!r}: "
                f"use one of {', '.join(_COMPUTE_DTYPES)}"
            )
        for name, choice in _ONLY_CHOICE.items():
            if getattr(self, name) != choice:
                raise UnsupportedError(
                    f"contract {name} is {getattr(self, name)!r}: "
                    f"this release implements {choice!r} only"
                )
        if type(self.tp_invariant) is not bool:
            raise InvalidInputError(
                f"contract tp_invariant is {self.tp_invariant!r}: use True or False"
            )
        for name in _POWERS_OF_TWO:
            value = getattr(self, name)
            if type(value) is not int or value < 1 or value & (value - 1):
                raise InvalidInputError(
                    f"contract {name} is {value!r}: use a power of two, best the default"
                )
        if type(self.kernels_revision) is not int or self.kernels_revision < 1:
            raise InvalidInputError(
                f"contract kernels_revision is {self.kernels_revision!r}: use a positive integer"
            )

    def require_supported(self) -> None:
        """Checks that the kernels of this release compute as the record says.

        A record that was read from a peer may name the choices of another release; whoever computes
        under a record calls this first.

        Raises:
            UnsupportedError: one line that names every field with a value that is not compiled in.
        """
        listed = "; ".join(
            f"{name} is {getattr(self, name)!r}, the kernels of this release have {value}"
            for name, value in _COMPILED_IN.items()
            if getattr(self, name) != value
        )
        if listed:
            raise UnsupportedError(f"contract {listed}: leave these fields at their defaults")

    @property
    def torch_dtype(self) -> torch.dtype:
        """``compute_dtype`` as a torch dtype."""
        return _COMPUTE_DTYPES[self.compute_dtype]

    def matmul_chunks(self, k: int) -> int:
        """Number of chunks that a reduction of length ``k`` is cut into: a function of ``k`` alone.

        With ``tp_invariant`` the largest power of two C <= ``matmul_max_chunks`` for which
        ``matmul_chunk_granule * C`` divides ``k``, else 1; without it always 1.

        Args:
            k: length of the reduction, >= 0.

        Raises:
            InvalidInputError: ``k`` is not an integer >= 0.
        """
        if type(k) is not int or k < 0:
            raise InvalidInputError(f"k is {k!r}: use the length of the reduction, an integer >= 0")
        if not self.tp_invariant or k == 0:
            return 1
        chunks = self.matmul_max_chunks
        while chunks > 1 and k % (self.matmul_chunk_granule * chunks):
            chunks //= 2
        return chunks

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces; equal contracts give equal text."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> NumericsContract:
        """Reads `to_json`'s text.

        Raises:
            InvalidInputError: not JSON, not an object, a key unknown or missing. A missing key is
                an error because its default could differ from what the writer computed with.
            UnsupportedError: a value that this release does not implement.
        """
        try:
            values: Any = json.loads(text)
        except (ValueError, TypeError) as error:
            raise InvalidInputError(f"contract is not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise InvalidInputError(
                f"contract is a JSON {type(values).__name__}: use an object, one key per field"
            )
        known = {field.name for field in fields(cls)}
        if values.get("schema", SCHEMA) == SCHEMA:
            unknown = sorted(values.keys() - known)
            if unknown:
                raise InvalidInputError(
                    f"contract has unknown keys {', '.join(unknown)}: "
                    "remove them, or run the same release on both sides"
                )
            missing = sorted(known - values.keys())
            if missing:
                raise InvalidInputError(
                    f"contract lacks keys {', '.join(missing)}: write every field"
                )
        return cls(**{name: value for name, value in values.items() if name in known})

    def digest(self) -> str:
        """16 hexadecimal digits of blake2b over the canonical JSON."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=8).hexdigest()

    def difference(self, other: NumericsContract) -> tuple[str, ...]:
        """Names of the fields in which ``other`` differs, in declaration order; empty if none."""
        return tuple(
            field.name
            for field in fields(self)
            if getattr(self, field.name) != getattr(other, field.name)
        )

    def require_equal(self, other: NumericsContract) -> None:
        """Raises `ContractMismatchError` in one line that names every differing field and both
        values."""
        names = self.difference(other)
        if names:
            listed = "; ".join(
                f"{name} is {getattr(self, name)!r} here and {getattr(other, name)!r} there"
                for name in names
            )
            raise ContractMismatchError(
                f"numerics contracts {self.digest()} and {other.digest()} differ: {listed}. "
                "Give both sides the same contract."
            )
