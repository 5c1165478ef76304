"""Who may speak, and what of it is believed: the handshake and the frames, without a network."""

from __future__ import annotations

import copy
import os
import random
import struct
import tracemalloc
from pathlib import Path

import msgspec
import pytest

from weightplane.errors import ChannelError, InvalidArgumentError
from weightplane.session import HANDSHAKE_BYTES, Session, Side

SECRET = b"a secret of more than 16 bytes"


def shake(server: Session, client: Session) -> None:
    for _ in range(3):
        client.feed(server.take_output())
        server.feed(client.take_output())


@pytest.fixture
def joined():
    server, client = Session(Side.SERVER, SECRET), Session(Side.CLIENT, SECRET)
    shake(server, client)
    assert server.established
    assert client.established
    return server, client


def test_both_sides_hear_exactly_what_the_other_said(joined):
    server, client = joined
    bodies = [b"", b"one", bytes(70_000), b"\xff" * 5]
    stream = b"".join(client.seal(body) for body in bodies)
    heard = []
    for start in range(0, len(stream), 997):
        heard += server.feed(stream[start : start + 997])
    assert heard == bodies
    assert client.feed(server.seal(b"answer")) == [b"answer"]


def test_a_wrong_secret_is_refused_by_the_server_before_anything_is_believed():
    server, client = Session(Side.SERVER, SECRET), Session(Side.CLIENT, SECRET + b"!")
    client.feed(server.take_output())
    with pytest.raises(ChannelError, match="does not know the shared secret"):
        server.feed(client.take_output())
    with pytest.raises(ChannelError, match="does not know the shared secret"):
        server.feed(b"")
    assert not server.established


def test_a_server_that_does_not_know_the_secret_is_refused_by_the_client():
    server, client = Session(Side.SERVER, SECRET), Session(Side.CLIENT, SECRET)
    client.feed(server.take_output())
    body = msgspec.msgpack.encode({"type": "accepted", "code": bytes(32)})
    with pytest.raises(ChannelError, match="does not know the shared secret"):
        client.feed(struct.pack("!I", len(body)) + body)


def test_a_clients_own_proof_cannot_be_sent_back_to_it():
    server, client = Session(Side.SERVER, SECRET), Session(Side.CLIENT, SECRET)
    client.feed(server.take_output())
    answer = msgspec.msgpack.decode(client.take_output()[4:])
    body = msgspec.msgpack.encode({"type": "accepted", "code": answer["code"]})
    with pytest.raises(ChannelError, match="does not know"):
        client.feed(struct.pack("!I", len(body)) + body)


def test_a_recorded_session_is_worth_nothing_against_a_new_one():
    server, client = Session(Side.SERVER, SECRET), Session(Side.CLIENT, SECRET)
    client.feed(server.take_output())
    recorded = client.take_output()
    server.feed(recorded)
    assert server.established
    with pytest.raises(ChannelError, match="replays old messages"):
        Session(Side.SERVER, SECRET).feed(recorded)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda first, second: first + first, "frame 0 where frame 1 is due"),
        (lambda first, second: second, "frame 1 where frame 0 is due"),
        (lambda first, second: second + first, "repeated, reordered or lost"),
        (lambda first, second: first[:14] + b"X" + first[15:], "altered or forged"),
        (lambda first, second: first[:-1] + bytes([first[-1] ^ 1]), "altered or forged"),
        (lambda first, second: struct.pack("!IQ", 1 << 30, 0), "the limit is"),
    ],
)
def test_frames_that_were_tampered_with_are_refused(joined, spoil, reason):
    server, client = joined
    with pytest.raises(ChannelError, match=reason):
        server.feed(spoil(client.seal(b"first"), client.seal(b"second")))


def test_what_one_side_said_cannot_be_played_back_to_it(joined):
    server, _ = joined
    with pytest.raises(ChannelError, match="altered or forged"):
        server.feed(server.seal(b"commit"))


def test_a_stranger_makes_nobody_keep_more_than_a_handshake():
    server = Session(Side.SERVER, SECRET)
    with pytest.raises(ChannelError, match=f"the limit is {HANDSHAKE_BYTES}"):
        server.feed(struct.pack("!I", 1 << 31) + bytes(1 << 20))
    assert server.buffered == 0


@pytest.mark.parametrize("secret", [b"", b"short", "a secret that is no bytes"])
def test_a_secret_that_is_none_is_refused(secret):
    with pytest.raises(InvalidArgumentError, match="shared secret"):
        Session(Side.SERVER, secret)


def fuzzed(random_: random.Random, count: int) -> int:
    """Feed hostile input to fresh and to established sessions; returns how many were refused."""
    recorded_server, recorded_client = Session(Side.SERVER, SECRET), Session(Side.CLIENT, SECRET)
    recorded_client.feed(recorded_server.take_output())
    recorded = recorded_client.take_output()
    recorded_server.feed(recorded)
    stranger = Session(Side.CLIENT, b"another secret of 16 bytes")
    stranger.feed(Session(Side.SERVER, SECRET).take_output())
    wrong = stranger.take_output()
    server, client = Session(Side.SERVER, SECRET), Session(Side.CLIENT, SECRET)
    shake(server, client)
    frame = client.seal(b"a body of some length")
    recorded_client.feed(recorded_server.take_output())
    elsewhere = recorded_client.seal(b"a frame of another session")
    refused = 0
    for turn in range(count):
        kind = turn % 5
        if kind == 0:
            target, data = Session(Side.SERVER, SECRET), random_.randbytes(random_.randrange(4, 90))
            data = struct.pack("!I", len(data)) + data
        elif kind == 1:
            target, data = Session(Side.SERVER, SECRET), recorded
        elif kind == 2:
            target, data = Session(Side.SERVER, SECRET), wrong
        else:
            # The same established session again and again, from its state before the frame.
            target = copy.copy(server)
            target._incoming, target._outgoing = bytearray(), bytearray()
            data = bytearray(frame if kind == 3 else elsewhere)
            if kind == 3:
                data[random_.randrange(4, len(data))] ^= 1 << random_.randrange(8)
            data = bytes(data)
        try:
            target.feed(data)
        except ChannelError as error:
            assert str(error)
            refused += 1
    return refused


def test_fuzzed_messages_are_refused_with_a_reason_and_nothing_grows():
    random_ = random.Random(4)
    fuzzed(random_, 200)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    assert fuzzed(random_, 3_000) == 3_000
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert after - before < 64 << 10


@pytest.mark.slow
def test_a_hundred_thousand_fuzzed_messages_are_refused_and_nothing_grows():
    random_ = random.Random(5)
    fuzzed(random_, 5_000)
    before = resident_bytes()
    assert fuzzed(random_, 100_000) == 100_000
    assert resident_bytes() - before < 4 << 20


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGESIZE")
