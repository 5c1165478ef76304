"""Framing, limits, descriptors, and whatever a broken peer may send."""

from __future__ import annotations

import itertools
import os
import socket
import struct

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightplane.channel import MAX_DESCRIPTORS, Channel, channel_pair
from weightplane.errors import ChannelClosedError, ChannelError, InvalidArgumentError, StalledError
from weightplane.messages import (
    Aborted,
    Announce,
    DeltaOffer,
    Goodbye,
    Progress,
    Refused,
    Staged,
    Welcome,
)

MESSAGES = [
    Welcome(1, "digest", 7, "shm", 2, 4096, b"endpoint"),
    Announce(3, None, "manifest", 1.5, 2.5, 1, 7, bytes(32), DeltaOffer("b", 64, 9, bytes(16))),
    Progress(3, 1 << 40),
    Staged(3, 1.0, 10, 0.1, 0.2),
    Aborted(3, "torn: \N{SNOWMAN}"),
    Refused("layout", "x" * 100_000),
    Goodbye(""),
]


def frame(body: bytes, magic: bytes = b"LSWP", descriptors: int = 0, length: int = -1) -> bytes:
    return struct.pack("!4sB3xI", magic, descriptors, len(body) if length < 0 else length) + body


@pytest.fixture
def pair():
    left, right = channel_pair()
    channels = Channel(left), Channel(right)
    yield channels
    for channel in channels:
        channel.close()


@pytest.fixture
def raw():
    """A channel whose peer is a bare socket."""
    left, right = channel_pair()
    channel = Channel(left)
    yield channel, right
    channel.close()
    right.close()


def test_messages_arrive_whole_and_in_order(pair):
    left, right = pair
    for message in MESSAGES:
        left.send(message)
    received = []
    while len(received) < len(MESSAGES):
        received += [item.message for item in right.receive(5)]
    assert received == MESSAGES


@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(0, 400), max_size=6))
def test_messages_may_be_cut_anywhere_on_their_way(cuts):
    left, right = channel_pair()
    channel = Channel(left)
    stream = b"".join(
        frame(msgspec.msgpack.encode(message)) for message in MESSAGES if message != MESSAGES[5]
    )
    received = []
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    for start, stop in itertools.pairwise(edges):
        right.sendall(stream[start:stop])
        received += [item.message for item in channel.read()]
    assert received == [message for message in MESSAGES if message != MESSAGES[5]]
    channel.close()
    right.close()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "does not speak this protocol"),
        (frame(b"", length=1 << 30), "message of 1073741824 bytes; the limit is"),
        (frame(b"\xc1"), "malformed message"),
        (frame(msgspec.msgpack.encode({"type": "reboot"})), "malformed message.*reboot"),
        (frame(msgspec.msgpack.encode({"type": "progress", "number": 1})), "byte_count"),
        (
            frame(msgspec.msgpack.encode({"type": "goodbye", "reason": "", "more": 1})),
            "unknown field.*more",
        ),
        (
            frame(msgspec.msgpack.encode({"type": "progress", "number": "1", "byte_count": 2})),
            "Expected `int`, got `str`",
        ),
        (frame(msgspec.msgpack.encode([1, 2])), "malformed message"),
        (frame(msgspec.msgpack.encode(MESSAGES[2]), descriptors=2), "names 2 descriptors, 0 arr"),
    ],
)
def test_what_is_no_message_is_refused_with_a_reason(raw, data, reason):
    channel, peer = raw
    peer.sendall(data)
    with pytest.raises(ChannelError, match=reason):
        channel.receive(5)
    with pytest.raises(ChannelError, match=reason):
        channel.read()


@settings(max_examples=200, deadline=None)
@given(body=st.binary(max_size=200), header=st.booleans())
def test_random_bytes_never_do_more_than_raise_a_channel_error(body, header):
    left, right = channel_pair()
    channel = Channel(left)
    right.sendall(frame(body) if header else body)
    right.close()
    try:
        while True:
            channel.receive(5)
    except ChannelError:
        pass
    finally:
        channel.close()


def test_what_arrived_before_a_fault_is_delivered_first(raw):
    channel, peer = raw
    peer.sendall(frame(msgspec.msgpack.encode(MESSAGES[2])) + b"garbage, garbage")
    assert [item.message for item in channel.read()] == [MESSAGES[2]]
    with pytest.raises(ChannelError, match="does not speak"):
        channel.read()


def test_a_peer_that_closes_is_reported_after_what_it_said(pair):
    left, right = pair
    left.send(MESSAGES[2])
    left.close()
    assert [item.message for item in right.receive(5)] == [MESSAGES[2]]
    with pytest.raises(ChannelClosedError, match=r"the peer closed the channel$"):
        right.receive(5)


def test_a_peer_that_dies_in_the_middle_of_a_message_is_reported(raw):
    channel, peer = raw
    peer.sendall(frame(b"x" * 100)[:50])
    peer.close()
    with pytest.raises(ChannelClosedError, match="in the middle of a message"):
        channel.receive(5)


def test_sending_to_a_dead_peer_neither_raises_nor_kills(pair):
    left, right = pair
    right.close()
    left.send(MESSAGES[2])
    with pytest.raises(ChannelClosedError):
        left.receive(5)


def test_a_message_over_the_limit_is_not_sent():
    left, right = channel_pair()
    channel = Channel(left, max_message_bytes=1000)
    with pytest.raises(ChannelError, match=r"Refused message has .* bytes; the limit .* 1000"):
        channel.queue(MESSAGES[5])
    channel.close()
    right.close()


def test_a_peer_that_does_not_read_blocks_nobody(pair):
    left, right = pair
    big = Refused("layout", "x" * (1 << 20))
    left.queue(big)
    left.queue(MESSAGES[2])
    assert not left.flush()
    assert left.wants_write
    with pytest.raises(StalledError, match=r"did not read a Progress for 0.05 seconds"):
        left.send(MESSAGES[2], timeout=0.05)
    received = []
    while len(received) < 3:
        received += [item.message for item in right.read()]
        left.flush()
    assert received == [big, MESSAGES[2], MESSAGES[2]]


def test_silence_is_reported_after_the_timeout(pair):
    with pytest.raises(StalledError, match=r"said nothing for 0.01 seconds"):
        pair[0].receive(0.01)


def test_descriptors_stay_with_their_message(pair):
    left, right = pair
    read_end, write_end = os.pipe()
    left.queue(MESSAGES[0])
    left.queue(MESSAGES[5], [read_end, write_end])
    left.queue(MESSAGES[2])
    received = []
    while len(received) < 3:
        left.flush()
        received += right.read()
    assert [len(item.descriptors) for item in received] == [0, 2, 0]
    theirs = received[1].descriptors
    os.write(theirs[1], b"hello")
    assert os.read(read_end, 5) == b"hello"
    assert not any(os.get_inheritable(descriptor) for descriptor in theirs)
    for descriptor in (read_end, write_end, *theirs):
        os.close(descriptor)


def test_descriptors_that_nobody_took_are_closed_with_the_channel(raw, open_files):
    channel, peer = raw
    before = open_files().keys()
    null = os.open("/dev/null", os.O_RDONLY)
    socket.send_fds(peer, [frame(b"\xc1", descriptors=1)], [null])
    os.close(null)
    with pytest.raises(ChannelError):
        channel.receive(5)
    channel.close()
    assert open_files().keys() <= before


def test_a_flood_of_descriptors_is_refused_and_closed(raw, open_files):
    channel, peer = raw
    before = open_files().keys()
    null = os.open("/dev/null", os.O_RDONLY)
    socket.send_fds(peer, [frame(b"", descriptors=200)], [null] * 200)
    os.close(null)
    with pytest.raises(ChannelError, match=f"more than {MAX_DESCRIPTORS} descriptors"):
        channel.receive(5)
    channel.close()
    assert open_files().keys() <= before


def test_too_many_descriptors_are_not_sent(pair):
    with pytest.raises(ChannelError, match="17 descriptors"):
        pair[0].queue(MESSAGES[0], [0] * 17)


def test_only_a_connected_stream_socket_of_this_machine_makes_a_channel():
    with socket.socket(socket.AF_INET) as internet, pytest.raises(InvalidArgumentError):
        Channel(internet)
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams,
        pytest.raises(InvalidArgumentError, match="SOCK_STREAM"),
    ):
        Channel(datagrams)


def test_a_descriptor_that_was_not_inherited_is_explained():
    with pytest.raises(InvalidArgumentError, match="named in pass_fds"):
        Channel.inherited(9999)


def test_closing_twice_is_fine(pair):
    pair[0].close()
    pair[0].close()
