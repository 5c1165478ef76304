"""Bytes of a `RoutingTrace`, self-describing and checked.

    magic    8 bytes   b"LSROUTES"
    schema   uint16    1
    header   uint32    length of the header
    payload  uint64    length of the payload
    header   canonical JSON: dtype, shape, layers, experts, segments
    payload  expert ids (row-major, little-endian), then one byte per token for valid
    digest   16 bytes  blake2b of everything before it

All integers are little-endian. The digest is checked before anything is interpreted.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import struct
import sys
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from consistency.errors import RoutingTraceError, UnsupportedError
from consistency.routing_replay.segment import Segment

MAGIC: Final = b"LSROUTES"
SCHEMA: Final = 1

_PREFIX: Final = struct.Struct("<8sHIQ")
_DIGEST_BYTES: Final = 16
_DTYPES: Final = {"uint8": torch.uint8, "uint16": torch.uint16}
_KEYS: Final = frozenset({"dtype", "shape", "layers", "experts", "segments"})


class TraceFields(NamedTuple):
    """The fields of a `RoutingTrace`, in its order."""

    expert_ids: Tensor
    layers: tuple[int, ...]
    experts: int
    valid: Tensor
    segments: tuple[Segment, ...]


def encode(
    expert_ids: Tensor,
    layers: tuple[int, ...],
    experts: int,
    valid: Tensor,
    segments: tuple[Segment, ...],
) -> bytes:
    """A checked trace as bytes; traces that route alike give equal bytes."""
    body = _body(TraceFields(expert_ids, layers, experts, valid, segments))
    return body + _digest(body)


def digest(
    expert_ids: Tensor,
    layers: tuple[int, ...],
    experts: int,
    valid: Tensor,
    segments: tuple[Segment, ...],
) -> str:
    """The digest that `encode` appends, in hexadecimal."""
    return _digest(_body(TraceFields(expert_ids, layers, experts, valid, segments))).hex()


def decode(data: bytes | bytearray | memoryview) -> TraceFields:
    """Reads `encode`'s bytes into tensors of their own; the trace that is made of them checks the
    rest.

    Raises:
        RoutingTraceError: not a trace, another schema, truncated, trailing bytes, or corrupt.
    """
    _require_little_endian()
    view = memoryview(data).cast("B")
    if len(view) < _PREFIX.size:
        raise RoutingTraceError(
            f"routing trace is truncated: {len(view)} bytes, its first {_PREFIX.size} are missing"
        )
    magic, schema, header_length, payload_length = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise RoutingTraceError(
            f"bytes start with {magic!r}, not {MAGIC!r}: this is not a routing trace"
        )
    if schema != SCHEMA:
        raise RoutingTraceError(
            f"routing trace has schema {schema}, this release reads {SCHEMA}: "
            "run the same release on both sides"
        )
    payload_start = _PREFIX.size + header_length
    payload_stop = payload_start + payload_length
    expected = payload_stop + _DIGEST_BYTES
    if len(view) != expected:
        state = "is truncated" if len(view) < expected else "has bytes after its end"
        raise RoutingTraceError(f"routing trace {state}: {len(view)} bytes, expected {expected}")
    if _digest(view[:payload_stop]) != view[payload_stop:]:
        raise RoutingTraceError("routing trace is corrupt: its digest differs; fetch it again")
    header = _header(bytes(view[_PREFIX.size : payload_start]))
    return _fields(header, view[payload_start:payload_stop])


def _body(trace: TraceFields) -> bytes:
    _require_little_endian()
    header = json.dumps(
        {
            "dtype": str(trace.expert_ids.dtype).removeprefix("torch."),
            "shape": list(trace.expert_ids.shape),
            "layers": list(trace.layers),
            "experts": trace.experts,
            "segments": [
                [part.start, part.stop, part.weight_version, part.origin] for part in trace.segments
            ],
        },
        sort_keys=True,
        separators=(",", ":"),
    ).encode()
    # Ids of invalid tokens mean nothing; zeroed, equal routings have equal bytes.
    ids = torch.where(
        trace.valid[:, None, None], trace.expert_ids, torch.zeros_like(trace.expert_ids)
    )
    payload = _bytes_of(ids) + _bytes_of(trace.valid)
    return _PREFIX.pack(MAGIC, SCHEMA, len(header), len(payload)) + header + payload


def _fields(header: dict[str, Any], payload: memoryview) -> TraceFields:
    try:
        dtype = _DTYPES[header["dtype"]]
        tokens, layers, topk = (_natural(size) for size in header["shape"])
        segments = tuple(Segment(*fields) for fields in header["segments"])
        layer_indices = tuple(header["layers"])
    except (KeyError, TypeError, ValueError) as error:
        raise RoutingTraceError(f"routing trace has a malformed header: {error!r}") from error
    count = math.prod((tokens, layers, topk))
    size = count * dtype.itemsize
    if len(payload) != size + tokens:
        raise RoutingTraceError(
            f"routing trace holds {len(payload)} bytes for shape {header['shape']} of "
            f"{header['dtype']}: expected {size + tokens}"
        )
    flags = _tensor_from(payload[size:], torch.uint8, tokens)
    if bool((flags > 1).any()):
        raise RoutingTraceError("routing trace holds a valid flag other than 0 and 1")
    return TraceFields(
        expert_ids=_tensor_from(payload[:size], dtype, count).reshape(tokens, layers, topk),
        layers=layer_indices,
        experts=header["experts"],
        valid=flags.to(torch.bool),
        segments=segments,
    )


def _header(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except ValueError as error:
        raise RoutingTraceError(f"routing trace header is not JSON: {error}") from error
    if not isinstance(header, dict) or header.keys() != _KEYS:
        raise RoutingTraceError(
            f"routing trace header must hold exactly the keys {', '.join(sorted(_KEYS))}"
        )
    return header


def _natural(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not an integer >= 0")
    return value


def _digest(body: bytes | memoryview) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()


def _bytes_of(tensor: Tensor) -> bytes:
    """Raw bytes, without numpy."""
    flat = tensor.contiguous().cpu()
    return ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size())


def _tensor_from(data: memoryview, dtype: torch.dtype, count: int) -> Tensor:
    # frombuffer refuses an empty buffer, and would share memory that the caller may still write to.
    if count == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype, count=count)


def _require_little_endian() -> None:
    if sys.byteorder != "little":
        raise UnsupportedError("routing traces are little-endian bytes; this machine is big-endian")
