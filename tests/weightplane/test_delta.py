"""A base and a delta give the bits of the full state; a delta is used when it is smaller."""

from __future__ import annotations

import logging

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightplane import Publisher
from weightplane.delta import BLOCK_WORDS, Delta, encode_delta
from weightplane.errors import DigestMismatchError, InvalidArgumentError
from weightplane.p2p.shm import ShmTransport
from weightplane.slots import slot_bytes

SIZES = [64, 4096, 2 * BLOCK_WORDS, 2 * BLOCK_WORDS + 64, (1 << 20) + 192, 3 << 20]


def rebuilt(base, new):
    target = numpy.zeros(8 + 3 * base.size, numpy.uint8)
    length = encode_delta(base, new, target)
    assert length is not None
    delta = Delta.parse(target[:length].copy(), base.size)
    result = base.copy()
    cut = base.size // 128 * 64
    delta.apply(result, 0, cut)
    delta.apply(result, cut, base.size)
    return result, length


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.5, 1.0])
def test_base_and_delta_give_exactly_the_new_bytes(size, share):
    random = numpy.random.default_rng(size)
    base = random.integers(0, 256, size, numpy.uint8)
    new = base.copy()
    places = random.random(size) < share
    new[places] ^= random.integers(1, 256, int(places.sum()), numpy.uint8)
    result, length = rebuilt(base, new)
    assert numpy.array_equal(result, new)
    changed = int((base.view(numpy.uint16) != new.view(numpy.uint16)).sum())
    assert length == 4 * -(-size // (2 * BLOCK_WORDS)) + 4 * changed


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=64, max_size=64), st.binary(min_size=64, max_size=64))
def test_any_two_buffers_differ_by_an_exact_delta(left, right):
    base, new = (numpy.frombuffer(data, numpy.uint8) for data in (left, right))
    assert numpy.array_equal(rebuilt(base, new)[0], new)


def test_first_and_last_words_of_blocks_are_found():
    base = numpy.zeros(8 * BLOCK_WORDS, numpy.uint8)
    new = base.copy()
    for word in (0, BLOCK_WORDS - 1, BLOCK_WORDS, 2 * BLOCK_WORDS - 1, 4 * BLOCK_WORDS - 1):
        new.view(numpy.uint16)[word] = word % 1000 + 1
    assert numpy.array_equal(rebuilt(base, new)[0], new)


def test_a_change_of_sign_of_zero_and_of_a_nans_payload_is_a_change():
    base = torch.tensor([0.0, float("nan"), 1.0, 2.0], dtype=torch.bfloat16)
    new = base.clone()
    new[0] = -0.0
    new.view(torch.int16)[1] += 1
    pair = [tensor.view(torch.uint8).numpy().copy() for tensor in (base, new)]
    assert numpy.array_equal(rebuilt(*pair)[0], pair[1])


def test_a_delta_that_does_not_fit_is_none():
    base, new = numpy.zeros(4096, numpy.uint8), numpy.ones(4096, numpy.uint8)
    assert encode_delta(base, new, numpy.zeros(4096, numpy.uint8)) is None
    assert encode_delta(base, new, numpy.zeros(2, numpy.uint8)) is None


def test_buffers_of_two_sizes_are_refused():
    with pytest.raises(InvalidArgumentError, match="one size"):
        encode_delta(numpy.zeros(64, numpy.uint8), numpy.zeros(128, numpy.uint8), numpy.zeros(8))


@pytest.mark.parametrize("spoil", ["short", "long", "order", "outside", "empty"])
def test_bytes_that_are_no_delta_are_refused(spoil):
    base, new = numpy.zeros(4096, numpy.uint8), numpy.zeros(4096, numpy.uint8)
    new[:40] = 1
    target = numpy.zeros(4096, numpy.uint8)
    encoded = target[: encode_delta(base, new, target)].copy()
    if spoil == "short":
        encoded = encoded[:-2]
    elif spoil == "long":
        encoded = numpy.concatenate([encoded, encoded])
    elif spoil == "order":
        encoded[4:6] = 200
    elif spoil == "outside":
        encoded[4 + 2 * 19 : 4 + 2 * 20] = 255
    else:
        encoded = encoded[:0]
    with pytest.raises(DigestMismatchError):
        Delta.parse(encoded, 4096)


def step(weights, seed, share=0.01):
    """What a step of reinforcement learning does: few bf16 weights move, by one unit or two."""
    generator = torch.Generator().manual_seed(seed)
    moved = {}
    for name, tensor in weights.items():
        moved[name] = tensor.clone()
        if tensor.dtype is torch.bfloat16:
            flat = moved[name].view(-1).view(torch.int16)
            flat += (torch.rand(flat.shape, generator=generator) < share).short()
    return moved


@pytest.fixture
def deltas(layout):
    with Publisher(layout, deltas=True) as publisher:
        yield publisher


def test_a_small_change_travels_as_a_delta_and_is_served_exactly(deltas, join, state, same):
    engine = join(deltas, share=False)
    deltas.wait_subscribers(1, 10)
    weights = state(0)
    for number in range(6):
        version = deltas.publish(weights, number)
        assert deltas.wait(number, 10).staged_everywhere
        assert same(engine.commit(number).tensors, weights)
        transfer = engine.records()[-1].transfer
        assert (version.base is None) == (number == 0)
        full = deltas.layout.byte_count
        assert transfer.byte_count == full if number == 0 else 0 < transfer.byte_count < full / 4
        weights = step(weights, number)


def test_packed_mxfp4_changes_travel_as_a_delta(join, same):
    generator = torch.Generator().manual_seed(1)
    weights = {
        "blocks": torch.randint(0, 256, (64, 512), dtype=torch.uint8, generator=generator),
        "scales": torch.randint(0, 256, (64, 32), dtype=torch.uint8, generator=generator),
    }
    from weightplane import Layout

    layout = Layout.of(weights)
    with Publisher(layout, deltas=True) as publisher:
        engine = join(publisher, layout=layout, share=False)
        publisher.wait_subscribers(1, 10)
        for number in range(3):
            publisher.publish(weights, number)
            assert publisher.wait(number, 10).staged_everywhere
            assert same(engine.commit(number).tensors, weights)
            weights = {name: tensor.clone() for name, tensor in weights.items()}
            weights["blocks"][number, ::37] ^= 0x30
        assert engine.records()[-1].transfer.byte_count < layout.byte_count / 20


def test_a_change_of_everything_travels_in_full(deltas, join, state, same):
    engine = join(deltas, share=False)
    deltas.wait_subscribers(1, 10)
    for number in range(3):
        assert deltas.publish(state(number), number).base is None
        assert deltas.wait(number, 10).staged_everywhere
        assert same(engine.commit(number).tensors, state(number))


def test_a_lost_base_falls_back_to_a_full_transfer_and_says_so(deltas, join, state, same, caplog):
    weights = state(0)
    deltas.publish(weights, 0)
    weights = step(weights, 1)
    assert deltas.publish(weights, 1).base is not None
    with caplog.at_level(logging.WARNING, logger="weightplane"):
        late = join(deltas, share=False)
        assert late.wait_staged(10).number == 1
    assert same(late.commit(1).tensors, weights)
    assert late.records()[-1].transfer.byte_count == deltas.layout.byte_count
    assert "weight version 1: its base is not held here" in caplog.text


def test_a_base_that_was_written_into_is_noticed_and_the_version_taken_in_full(
    deltas, join, state, same, caplog
):
    engine = join(deltas, share=False)
    deltas.wait_subscribers(1, 10)
    weights = state(0)
    deltas.publish(weights, 0)
    deltas.wait(0, 10)
    engine.commit(0).tensors["embedding"][0] += 1
    weights = step(weights, 1)
    with caplog.at_level(logging.WARNING, logger="weightplane"):
        deltas.publish(weights, 1)
        assert deltas.wait(1, 10).staged_everywhere
    assert same(engine.commit(1).tensors, weights)
    assert "weight version 1: the delta does not give it" in caplog.text


def test_several_engines_with_different_bases_all_end_with_the_same_bits(deltas, join, state, same):
    first = join(deltas, share=False)
    deltas.wait_subscribers(1, 10)
    weights = state(0)
    engines = [first]
    for number in range(4):
        if number == 2:
            engines.append(join(deltas, share=False))
            deltas.wait_subscribers(2, 10)
        deltas.publish(weights, number)
        assert deltas.wait(number, 10).staged_everywhere
        if number % 2:
            assert same(first.commit(number).tensors, weights)
        weights = step(weights, number)
    assert same(first.tensors, engines[1].commit(3).tensors)


class LinkTransport:
    """Shared memory that looks like a link: its slots cannot be kept, only read."""

    def __init__(self, slot_bytes, slots):
        self._memory = ShmTransport(slot_bytes, slots)

    @property
    def offer(self):
        return self._memory.offer

    def buffer(self, slot):
        return self._memory.buffer(slot)

    def seal(self, slot):
        self._memory.seal(slot)

    def close(self):
        self._memory.close()


@pytest.mark.parametrize(
    ("room", "slots", "expected"), [(True, 2, True), (False, 2, False), (True, 1, False)]
)
def test_deltas_are_chosen_where_bytes_cross_a_link_and_there_is_room(
    layout, join, state, same, room, slots, expected
):
    transport = LinkTransport(slot_bytes(layout, room), slots)
    with Publisher(layout, transport=transport) as publisher:
        engine = join(publisher)
        publisher.wait_subscribers(1, 10)
        weights = state(1, rows=8)
        for number in (1, 2):
            weights["layers.1.weight"][0, number] = number
            version = publisher.publish(weights, number)
            assert publisher.wait(number, 10).staged_everywhere
            engine.commit(number)
            assert same(engine.tensors, weights)
        assert (version.base is not None) is expected
        record = engine.records()[-1]
        assert (record.transfer.byte_count < layout.byte_count) is expected


def test_a_publisher_over_shared_memory_makes_no_deltas_unasked(publisher, join, state):
    join(publisher)
    for number in (1, 2):
        assert publisher.publish(state(1), number).base is None
