"""The control channel over real sockets: who gets in, what is served, what is left behind."""

from __future__ import annotations

import os
import random
import socket
import ssl
import subprocess
import threading

import pytest

from weightplane import Layout, Publisher, Subscriber
from weightplane.channel import Channel
from weightplane.errors import ChannelError, InvalidArgumentError
from weightplane.messages import Goodbye
from weightplane.wire import Gateway, connect
from weightplane.wire_settings import Address, WireSettings, secret_from_file

SECRET = b"a secret of more than 16 bytes"


@pytest.fixture(params=["tcp", "unix"])
def address(request, tmp_path):
    return Address() if request.param == "tcp" else Address("", 0, str(tmp_path / "gateway"))


@pytest.fixture
def gateway():
    opened = []

    def open_gateway(address, settings=None, on_channel=None):
        taken: list[Channel] = []
        settings = settings or WireSettings(SECRET)
        opened.append(Gateway(address, settings, on_channel or taken.append))
        return opened[-1], taken

    yield open_gateway
    for item in opened:
        item.close()


def test_versions_are_committed_over_an_authenticated_connection(
    address, gateway, layout, state, same
):
    """Shared memory too: without passed descriptors the slots are found through the kernel."""
    with Publisher(layout) as publisher:
        door, _ = gateway(address, on_channel=publisher.attach)
        link = connect(door.address, WireSettings(SECRET))
        with Subscriber(link.channel, layout) as engine:
            publisher.wait_subscribers(1, 10)
            for number in range(3):
                publisher.publish(state(number), number)
                assert publisher.wait(number, 10).staged_everywhere
                assert same(engine.commit(number).tensors, state(number))
        link.close()


def test_messages_larger_than_a_frame_arrive_whole(address, gateway, eventually):
    door, taken = gateway(address)
    link = connect(door.address, WireSettings(SECRET))
    eventually(lambda: bool(taken))
    text = "x" * (3 << 20)
    link.channel.queue(Goodbye(text))
    arrived = []
    while not arrived:
        link.channel.flush()
        arrived = taken[0].read()
    (received,) = arrived
    assert received.message == Goodbye(text)
    taken[0].close()
    link.close()


def test_a_wrong_secret_gets_nothing(address, gateway, eventually):
    door, taken = gateway(address)
    with pytest.raises(ChannelError):
        connect(door.address, WireSettings(b"some other secret, long enough"))
    eventually(lambda: door.refused == 1)
    assert "does not know the shared secret" in door.reasons[-1]
    assert taken == []


def test_file_descriptors_are_refused_where_they_cannot_travel(address, gateway, eventually):
    door, taken = gateway(address)
    link = connect(door.address, WireSettings(SECRET))
    with pytest.raises(ChannelError, match="carries no file descriptors"):
        link.channel.queue(Goodbye(""), (0,))
    eventually(lambda: bool(taken))
    taken[0].close()
    link.close()


def test_an_end_that_closes_is_noticed_by_the_other(address, gateway, eventually):
    door, taken = gateway(address)
    link = connect(door.address, WireSettings(SECRET))
    eventually(lambda: bool(taken))
    taken[0].close()
    with pytest.raises(ChannelError, match="closed the channel"):
        link.channel.receive(10)
    eventually(lambda: link.reason == "the peer closed the connection")
    link.close()


def test_a_peer_that_never_authenticates_is_dropped(address, gateway, eventually):
    settings = WireSettings(SECRET, handshake_seconds=0.2)
    door, _ = gateway(address, settings)
    with raw(door.address) as stranger:
        stranger.settimeout(10)
        while stranger.recv(1000):
            pass
    eventually(lambda: door.refused == 1)
    assert "did not authenticate in 0.2 seconds" in door.reasons[-1]


def raw(address: Address) -> socket.socket:
    if address.path is not None:
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(address.path)
        return stranger
    return socket.create_connection((address.host, address.port))


def test_a_silent_peer_trips_the_watchdog_and_a_living_one_does_not(gateway, eventually):
    settings = WireSettings(SECRET, heartbeat_seconds=0.1, stall_seconds=0.6)
    door, taken = gateway(Address(), settings)
    alive = connect(door.address, settings)
    silent = connect(door.address, WireSettings(SECRET, heartbeat_seconds=50, stall_seconds=100))
    eventually(lambda: any("no sign of life" in reason for reason in door.reasons))
    assert alive.reason == ""
    for channel in taken:
        channel.close()
    alive.close()
    silent.close()


def test_more_connections_than_allowed_are_refused(gateway, eventually):
    door, taken = gateway(Address(), WireSettings(SECRET, max_connections=1))
    link = connect(door.address, WireSettings(SECRET))
    with pytest.raises(ChannelError):
        connect(door.address, WireSettings(SECRET))
    assert "more than 1 connections" in door.reasons[-1]
    eventually(lambda: bool(taken))
    taken[0].close()
    link.close()


def test_hostile_bytes_are_refused_and_the_gateway_serves_on(address, gateway, eventually):
    door, taken = gateway(address)
    random_ = random.Random(1)
    for _ in range(40):
        with raw(door.address) as stranger:
            stranger.sendall(random_.randbytes(random_.randrange(1, 3000)))
    eventually(lambda: door.refused == 40 and door.connections == 0)
    assert all(door.reasons)
    link = connect(door.address, WireSettings(SECRET))
    eventually(lambda: len(taken) == 1)
    taken[0].close()
    link.close()


def test_beyond_loopback_only_with_tls_or_on_request(gateway):
    with pytest.raises(InvalidArgumentError, match="reachable from other machines"):
        gateway(Address("0.0.0.0"))
    door, _ = gateway(Address("0.0.0.0"), WireSettings(SECRET, allow_plain_network=True))
    assert door.address.port > 0


def test_tls_keeps_out_those_who_do_not_speak_it_or_trust_another_authority(
    gateway, tmp_path, eventually
):
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"],
        capture_output=True,
    )  # fmt: skip
    if made.returncode:
        pytest.skip(f"no openssl to make a certificate with: {made.stderr!r}")
    door, taken = gateway(
        Address(), WireSettings(SECRET, tmp_path / "cert.pem", tmp_path / "key.pem")
    )
    link = connect(door.address, WireSettings(SECRET, authority=tmp_path / "cert.pem"))
    eventually(lambda: bool(taken))
    with pytest.raises(ChannelError):
        connect(door.address, WireSettings(SECRET, handshake_seconds=2))
    context = ssl.create_default_context()
    with pytest.raises(ssl.SSLError), raw(door.address) as stranger:
        context.wrap_socket(stranger, server_hostname="localhost")
    taken[0].close()
    link.close()


def test_nothing_is_left_behind(address, gateway, open_files, eventually):
    before, threads = open_files().keys(), threading.active_count()
    for _ in range(3):
        door, taken = gateway(address)
        for _ in range(3):
            link = connect(door.address, WireSettings(SECRET))
            link.channel.close()
            link.close()
        eventually(lambda: len(taken) == 3)  # noqa: B023
        for channel in taken:
            channel.close()
        door.close()
        assert address.path is None or not os.path.exists(address.path)  # noqa: PTH110
    eventually(lambda: open_files().keys() <= before)
    assert threading.active_count() == threads


def test_a_large_layout_joins_through_a_gateway(gateway, state):
    weights = state(1)
    weights.update({f"more.{index}": weights["scale"] for index in range(20_000)})
    layout = Layout.of(weights)
    with Publisher(layout) as publisher:
        door, _ = gateway(Address(), on_channel=publisher.attach)
        link = connect(door.address, WireSettings(SECRET))
        with Subscriber(link.channel, layout) as engine:
            publisher.publish(weights, 1)
            assert engine.wait_staged(30).number == 1
        link.close()


@pytest.mark.parametrize("text", ["", "http://x:1", "tcp://", "unix://", "tcp://h:99999", "h:1"])
def test_an_address_that_is_none_is_refused(text):
    with pytest.raises(InvalidArgumentError, match="address"):
        Address.parse(text)


@pytest.mark.parametrize("text", ["tcp://127.0.0.1:80", "tcp://[::1]:8", "unix:///run/gateway"])
def test_addresses_read_as_they_are_written(text):
    address = Address.parse(text)
    assert str(address) == text
    assert address.is_local


@pytest.mark.parametrize(
    "options",
    [
        {"secret": b"short"},
        {"certificate": "cert.pem"},
        {"handshake_seconds": 0},
        {"stall_seconds": 1},
        {"max_connections": 0},
    ],
)
def test_settings_that_cannot_work_are_refused(options):
    with pytest.raises(InvalidArgumentError):
        WireSettings(**{"secret": SECRET, **options})


def test_a_secret_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(SECRET + b"\n")
    path.chmod(0o644)
    with pytest.raises(InvalidArgumentError, match="chmod 600"):
        secret_from_file(path)
    path.chmod(0o600)
    assert secret_from_file(path) == SECRET
    assert SECRET.decode() not in repr(WireSettings(SECRET))
