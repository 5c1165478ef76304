import dataclasses
import hashlib
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.errors import RoutingTraceError
from consistency.routing_replay import RoutingTrace, concatenate

PREFIX = struct.Struct("<8sHIQ")


def trace(tokens=5, experts=300, valid=None):
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, 2, experts, generator=generator).topk(3, dim=-1).indices
    return RoutingTrace.of(
        ids, layers=(0, 4), experts=experts, weight_version=3, origin="generated", valid=valid
    )


def resigned(body):
    return body + hashlib.blake2b(body, digest_size=16).digest()


def with_header(data, change):
    """The same bytes with another header and a digest that fits it."""
    _, _, header_length, payload_length = PREFIX.unpack_from(data)
    header = change(data[PREFIX.size : PREFIX.size + header_length])
    payload = data[PREFIX.size + header_length : -16]
    prefix = PREFIX.pack(b"LSROUTES", 1, len(header), payload_length)
    return resigned(prefix + header + payload)


@pytest.mark.parametrize("experts", [8, 256, 257, 65536])
def test_a_trace_survives_its_bytes(experts):
    valid = torch.tensor([True, True, False, True, False])
    original = concatenate((trace(3, experts), trace(5, experts, valid)))
    for data in (original.to_bytes(), bytearray(original.to_bytes())):
        restored = RoutingTrace.from_bytes(data)
        assert restored == original
        assert restored.expert_ids.dtype is original.expert_ids.dtype


def test_restored_tensors_do_not_share_the_callers_memory():
    data = bytearray(trace().to_bytes())
    restored = RoutingTrace.from_bytes(data)
    data[:] = b"\0" * len(data)
    assert restored == trace()


def test_a_view_that_is_not_contiguous_has_the_bytes_of_its_copy():
    strided = dataclasses.replace(trace(), expert_ids=trace().expert_ids.mT.contiguous().mT)
    assert not strided.expert_ids.is_contiguous()
    assert strided.to_bytes() == trace().to_bytes()


def test_what_invalid_tokens_hold_does_not_change_the_digest():
    valid = torch.tensor([True, True, True, False, True])
    clean = trace(valid=valid)
    ids = clean.expert_ids.clone()
    ids[3] = 7
    assert dataclasses.replace(clean, expert_ids=ids).digest() == clean.digest()


def test_the_digest_is_the_one_in_the_bytes_and_sees_every_field():
    base = trace()
    assert base.to_bytes()[-16:].hex() == base.digest()
    others = [
        dataclasses.replace(base, layers=(0, 5)),
        dataclasses.replace(base, experts=301),
        dataclasses.replace(base, valid=torch.tensor([True] * 4 + [False])),
        dataclasses.replace(
            base, segments=(dataclasses.replace(base.segments[0], weight_version=4),)
        ),
        trace(4),
    ]
    assert len({item.digest() for item in (base, *others)}) == 6


def test_traces_use_the_bytes_they_promise():
    # 4096 tokens x 2 layers x 3 experts in uint8 and one byte per token for valid.
    data = trace(4096, experts=256).to_bytes()
    assert 4096 * 7 < len(data) < 4096 * 7 + 256


@pytest.mark.parametrize("length", [0, 1, 21, 22, 60, -1, -16])
def test_truncated_bytes_raise(length):
    with pytest.raises(RoutingTraceError, match="truncated"):
        RoutingTrace.from_bytes(trace().to_bytes()[:length])


def test_bytes_after_the_end_raise():
    with pytest.raises(RoutingTraceError, match="after its end"):
        RoutingTrace.from_bytes(trace().to_bytes() + b"\0")


def test_bytes_of_something_else_raise():
    with pytest.raises(RoutingTraceError, match="not a routing trace"):
        RoutingTrace.from_bytes(b"PK\x03\x04" + bytes(100))


def test_another_schema_raises():
    data = bytearray(trace().to_bytes())
    data[8:10] = (2).to_bytes(2, "little")
    with pytest.raises(RoutingTraceError, match="schema 2"):
        RoutingTrace.from_bytes(data)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_flipped_bit_raises(data):
    encoded = bytearray(trace().to_bytes())
    position = data.draw(st.integers(0, len(encoded) - 1))
    encoded[position] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(RoutingTraceError):
        RoutingTrace.from_bytes(encoded)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_the_one_error(data):
    with pytest.raises(RoutingTraceError):
        RoutingTrace.from_bytes(b"LSROUTES" + data)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"dtype":"uint16"', b'"dtype":"int64"', "malformed"),
        (b'"dtype":"uint16"', b'"dtype":"uint8"', "bytes for shape"),
        (b'"experts":300', b'"experts":"300"', "experts"),
        (b'"experts":300', b'"experts":2', "experts"),
        (b'"shape":[5,2,3]', b'"shape":[5,3,2]', "layers"),
        (b'"shape":[5,2,3]', b'"shape":[-5,2,-3]', "malformed"),
        (b'"shape":[5,2,3]', b'"shape":[5,6]', "malformed"),
        (b'"layers":[0,4]', b'"layers":[4,0]', "layers"),
        (b'"layers":[0,4]', b'"layers":null', "malformed"),
        (b'"generated"', b'"guessed"', "origin"),
        (b'[[0,5,3,"generated"]]', b"[[0,5]]", "malformed"),
        (b'"experts":300', b'"experts":300,"extra":1', "exactly the keys"),
        (b"{", b"[", "not JSON"),
    ],
)
def test_a_well_signed_header_that_lies_raises(old, new, message):
    encoded = trace().to_bytes()
    with pytest.raises(RoutingTraceError, match=message):
        RoutingTrace.from_bytes(with_header(encoded, lambda header: header.replace(old, new)))


def test_a_well_signed_valid_flag_that_is_no_bool_raises():
    body = bytearray(trace().to_bytes()[:-16])
    body[-1] = 2
    with pytest.raises(RoutingTraceError, match="valid flag"):
        RoutingTrace.from_bytes(resigned(bytes(body)))
