"""The element types that a layout may name, and how many bytes their elements take.

Four-bit elements lie two to a byte. Two names say so in two ways: ``float4_e2m1fn_x2`` is torch's
own dtype, whose shape counts *bytes*; ``float4_e2m1fn`` counts *elements*, so that a packed weight
has the shape of the matrix it stands for, and a box of it must begin and end at whole bytes. Block
scales of MXFP4 are ``float8_e8m0fnu``, one byte each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

__all__ = ["DTYPES", "DTYPE_NAMES", "elements_per_byte", "item_bytes", "packed_bytes"]

NIBBLES = "float4_e2m1fn"
"""Four-bit floats counted one by one; the last dimension is the packed one and must be even."""

DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2",
        "float8_e8m0fnu", "float4_e2m1fn_x2", "uint8", "uint16", "uint32", "uint64",
        "int8", "int16", "int32", "int64", "bool", "complex64", "complex128",
    )
    if hasattr(torch, name)
} | {NIBBLES: torch.float4_e2m1fn_x2}  # fmt: skip
"""The dtypes a layout may name; torch's quantised ones are absent, they carry scales aside."""

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    dtype: name for name, dtype in DTYPES.items() if name != NIBBLES
}


def elements_per_byte(dtype: str) -> int:
    """2 for nibbles counted one by one, else 1: how many elements share the smallest item."""
    return 2 if dtype == NIBBLES else 1


def item_bytes(dtype: str) -> int:
    """Bytes of the smallest item that can be addressed: an element, or a pair of nibbles."""
    return DTYPES[dtype].itemsize


def packed_bytes(shape: Sequence[int], dtype: str) -> int:
    """Bytes of a box of ``shape`` elements; the last extent of a nibble box is even."""
    return math.prod(shape) * item_bytes(dtype) // elements_per_byte(dtype)
