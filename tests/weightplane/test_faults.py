"""Faults that weight synchronisation is known for, one named test per kind."""

from __future__ import annotations

import ast
import threading
from pathlib import Path

import pytest

import weightplane
from weightplane import (
    Channel,
    ChannelError,
    CommitRefusedError,
    LayoutError,
    Publisher,
    Subscriber,
    VersionError,
    channel_pair,
)
from weightplane.digest import Manifest
from weightplane.errors import WeightPlaneError
from weightplane.messages import PROTOCOL, Announce, Goodbye, Hello, Staged, Welcome
from weightplane.p2p.shm import ShmReader, ShmTransport

PACKAGE = Path(weightplane.__file__).parent


class SpoiledReader(ShmReader):
    """Delivers bytes that differ from the slot's, or none, while ``fault`` is set."""

    fault: str = ""

    def read(self, slot, offset, destination):
        if self.fault == "fails":
            raise WeightPlaneError("the link went down")
        if self.fault == "breaks":
            raise ZeroDivisionError("a bug in the transport")
        if self.fault == "delivers nothing":
            return
        super().read(slot, offset, destination)
        if self.fault == "flips a bit":
            destination[len(destination) // 2] ^= 4


@pytest.fixture
def spoiled():
    """Readers whose faults a test can switch on."""
    opened: list[SpoiledReader] = []

    def open_reader(offer):
        opened.append(SpoiledReader(offer))
        return opened[-1]

    return opened, {"shm": open_reader}


def serve(publisher, engine, weights, number):
    publisher.publish(weights, number)
    assert publisher.wait(number, 10).staged_everywhere
    engine.commit(number)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("flips a bit", "corrupt or torn"),
        ("delivers nothing", "corrupt or torn"),
        ("fails", "the link went down"),
    ],
)
def test_a_version_that_did_not_arrive_whole_is_never_served(
    publisher, join, state, same, spoiled, fault, reason
):
    """Faults 1 and 2: a failed write called a success; uninitialised memory loaded."""
    opened, readers = spoiled
    engine = join(publisher, readers=readers)
    publisher.wait_subscribers(1, 10)
    serve(publisher, engine, state(1), 1)
    opened[0].fault = fault
    # The buffers that versions 2 and 3 are staged in held other weights, or zeros, before.
    for number in (2, 3):
        publisher.publish(state(number), number)
        publication = publisher.wait(number, 10)
        assert not publication.staged_everywhere
        assert reason in publication.failed[0].record.reason
        assert engine.staged() is None
        with pytest.raises(VersionError, match=rf"{number} is aborted .*{reason}"):
            engine.commit(number)
        assert engine.active.number == 1
        assert same(engine.tensors, state(1))
    opened[0].fault = ""
    serve(publisher, engine, state(4), 4)
    assert same(engine.tensors, state(4))


def test_a_bug_in_a_transport_ends_the_connection_loudly(publisher, join, state, same, spoiled):
    opened, readers = spoiled
    engine = join(publisher, readers=readers)
    publisher.wait_subscribers(1, 10)
    serve(publisher, engine, state(1), 1)
    opened[0].fault = "breaks"
    publisher.publish(state(2), 2)
    with pytest.raises(WeightPlaneError, match=r"ZeroDivisionError.*a bug in the transport"):
        engine.wait_staged(10)
    assert "the subscriber is gone" in publisher.wait(2, 10).failed[0].record.reason
    assert same(engine.tensors, state(1))


def test_a_byte_flipped_in_shared_memory_is_found_and_the_tensor_named(layout, join, state):
    transport = ShmTransport(layout.size)
    with Publisher(layout, transport=transport) as publisher:
        publisher.publish(state(1), 1)
        shard = next(shard for shard in layout.shards if shard.tensor == "layers.1.weight")
        buffer = transport.buffer(0)
        buffer[shard.offset + 5] ^= 1
        engine = join(publisher)
        with pytest.raises(WeightPlaneError, match=r"1 is aborted \(tensor 'layers\.1\.weight'"):
            engine.wait_staged(1)
        assert "layers.1.weight" in publisher.wait(1, 10).failed[0].record.reason
        buffer.release()
        publisher.publish(state(2), 2)
        assert engine.wait_staged(10).number == 2


def test_an_update_with_no_tensors_is_no_success(publisher):
    """Fault 1: an empty name list that succeeds."""
    with pytest.raises(LayoutError, match="is missing"):
        publisher.publish({}, 1)


def test_old_weights_serve_on_when_a_cache_cannot_be_invalidated(publisher, join, state, same):
    """Fault 4: a prefix cache that keeps what the old weights computed."""
    engine = join(publisher)
    publisher.wait_subscribers(1, 10)
    serve(publisher, engine, state(1), 1)
    broken = [True]
    dropped = []

    def invalidate(new, old):
        if broken:
            raise OSError("the disk tier does not answer")

    engine.register_cache("prefix cache", lambda new, old: dropped.append(new.number))
    engine.register_cache("disk tier", invalidate)
    publisher.publish(state(2), 2)
    publisher.wait(2, 10)
    with pytest.raises(CommitRefusedError, match=r"cache 'disk tier' .* weight version 1 goes on"):
        engine.commit(2)
    assert engine.active.number == 1
    assert same(engine.tensors, state(1))
    assert dropped == [2]
    broken.clear()
    assert engine.commit(2).invalidated == ("prefix cache", "disk tier")
    assert same(engine.tensors, state(2))
    broken.append(True)
    with pytest.raises(CommitRefusedError):
        engine.rollback()
    assert same(engine.tensors, state(2))


def test_an_fp32_router_sent_as_bf16_is_refused_on_both_sides(publisher, join, state):
    """Fault 5."""
    narrowed = state(1)
    narrowed["layers.0.router"] = narrowed["layers.0.router"].bfloat16()
    with pytest.raises(LayoutError, match=r"'layers\.0\.router' is bfloat16"):
        publisher.publish(narrowed, 1)
    engine = join(publisher, layout=weightplane.Layout.of(narrowed))
    with pytest.raises(weightplane.LayoutMismatchError, match=r"'layers\.0\.router' is bfloat16"):
        engine.wait_staged(10)


def test_no_segment_file_or_thread_is_left_behind(layout, join, state, open_files, eventually):
    """Fault 9: one shared-memory segment leaked per step."""
    segments = set(Path("/dev/shm").iterdir())
    files, threads = open_files().keys(), threading.active_count()
    for generation in range(3):
        with Publisher(layout) as publisher:
            engine = join(publisher)
            publisher.wait_subscribers(1, 10)
            for number in range(20):
                serve(publisher, engine, state(number), number)
            if generation:
                engine.close()
        engine.close()
    eventually(lambda: open_files().keys() == files)
    assert threading.active_count() == threads
    assert set(Path("/dev/shm").iterdir()) == segments


def test_a_stuck_subscriber_does_not_hold_up_the_others(publisher, join, state):
    """Fault 10: a dead rank blocks the others inside a collective."""
    gate = threading.Event()

    class StuckReader(ShmReader):
        def read(self, slot, offset, destination):
            gate.wait(20)
            super().read(slot, offset, destination)

    stuck = join(publisher, readers={"shm": StuckReader})
    engine = join(publisher)
    publisher.wait_subscribers(2, 10)
    for number in (1, 2):
        publisher.publish(state(number), number)
        assert engine.wait_staged(10).number == number
        engine.commit(number)
    assert stuck.staged() is None
    gate.set()
    assert publisher.wait(2, 10).staged_everywhere


def test_nothing_can_be_committed_before_its_bytes_have_landed(publisher, join, state):
    """Fault 10: a push races the resume, which starts before the bytes land."""
    gate = threading.Event()

    class GatedReader(ShmReader):
        def read(self, slot, offset, destination):
            gate.wait(20)
            super().read(slot, offset, destination)

    engine = join(publisher, readers={"shm": GatedReader})
    publisher.wait_subscribers(1, 10)
    publisher.publish(state(1), 1)
    with pytest.raises(VersionError, match=r"weight version 1 (is announced|was never announced)"):
        engine.commit(1)
    gate.set()
    assert engine.wait_staged(10).number == 1


def test_no_check_is_an_assertion_that_optimisation_removes():
    """Fault 13: ``assert transfer(...) == 0`` disappears under ``python -O``."""
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        lines = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]
        assert not lines, f"{path.name} asserts in lines {lines}"


def test_version_zero_and_rank_zero_names_are_as_good_as_any(publisher, join, state, same):
    """Fault 13: ``rank or int(env)`` breaks rank 0."""
    engine = join(publisher, name="")
    publisher.wait_subscribers(1, 10)
    serve(publisher, engine, state(0), 0)
    assert engine.active.number == 0
    assert same(engine.tensors, state(0))
    assert publisher.report(0).deliveries[0].subscriber == ""
    with pytest.raises(VersionError):
        publisher.publish(state(0), 0)


def test_the_version_label_moves_with_the_weights_and_never_before(publisher, join, state, same):
    """Fault 14: the label moves before the model is whole."""
    engine = join(publisher)
    publisher.wait_subscribers(1, 10)
    serve(publisher, engine, state(1), 1)
    seen = []
    engine.register_cache("watch", lambda new, old: seen.append(engine.active.number))
    publisher.publish(state(2), 2)
    publisher.wait(2, 10)
    assert engine.active.number == 1
    assert same(engine.tensors, state(1))
    engine.commit(2)
    assert seen == [1]
    assert engine.active.number == 2
    assert same(engine.tensors, state(2))


@pytest.fixture
def impostor(layout):
    """A real subscriber whose publisher is played by the test, up to the welcome."""
    ours, theirs = channel_pair()
    channel = Channel(ours)
    transport = ShmTransport(layout.size)
    with Subscriber(Channel(theirs), layout, name="engine") as engine:
        (hello,) = channel.receive(5)
        assert hello.message == Hello(PROTOCOL, "engine", hello.message.process, layout.to_json())

        def welcome(**changes):
            fields = {
                "protocol": PROTOCOL,
                "layout": layout.digest,
                "process": 1,
                "transport": "shm",
                "slots": 2,
                "slot_bytes": layout.size,
                "endpoint": b"",
                **changes,
            }
            channel.send(Welcome(**fields), transport.offer.descriptors)

        yield engine, channel, welcome
    channel.close()
    transport.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol": 9}, "protocol 9"),
        ({"layout": "other"}, "layout other"),
        ({"slot_bytes": 64}, "slots of 64 bytes, the layout needs"),
        ({"slots": 3}, "3 slots and 2 descriptors"),
        ({"slot_bytes": 1 << 40}, "a descriptor has"),
        ({"slots": 0}, "0 slots"),
    ],
)
def test_a_welcome_that_promises_what_is_not_there_is_refused(
    impostor, open_files, changes, reason
):
    engine, _, welcome = impostor
    before = open_files().keys()
    welcome(**changes)
    with pytest.raises(WeightPlaneError, match=reason):
        engine.wait_staged(10)
    assert open_files().keys() <= before


def announce(manifest: Manifest, /, **changes) -> Announce:
    fields = {
        "number": 1,
        "base": None,
        "manifest": manifest.digest,
        "created": 0.0,
        "announced_at": 0.0,
        "slot": 0,
        "claim": 0,
        "digests": manifest.pack(),
        "delta": None,
        **changes,
    }
    return Announce(**fields)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"digests": b""}, "0 bytes of digests for 8 tensors"),
        ({"digests": bytes(128)}, "the manifest of weight version 1 has digest"),
        ({"manifest": "forged"}, "announced was forged"),
    ],
)
def test_an_announcement_with_a_damaged_manifest_aborts_that_version(
    impostor, state, changes, reason
):
    engine, channel, welcome = impostor
    welcome()
    channel.send(announce(Manifest.of(state(1)), **changes))
    (answer,) = channel.receive(5)
    assert answer.message.number == 1
    assert reason in answer.message.reason
    assert engine.staged() is None


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Staged(1, 0.0, 1, 0.0, 0.0), "sent a Staged message out of turn"),
        (Goodbye("learner finished"), "learner finished; what is active keeps serving"),
    ],
)
def test_a_publisher_that_talks_out_of_turn_or_leaves_is_reported(impostor, message, reason):
    engine, channel, welcome = impostor
    welcome()
    channel.send(message)
    with pytest.raises(WeightPlaneError, match=reason):
        engine.wait_staged(10)


@pytest.mark.parametrize("changes", [{"slot": 2}, {"slot": -1}, {"number": -1}, {"manifest": ""}])
def test_an_impossible_announcement_ends_the_connection(impostor, state, changes):
    engine, channel, welcome = impostor
    welcome()
    channel.send(announce(Manifest.of(state(1)), **changes))
    with pytest.raises(WeightPlaneError):
        engine.wait_staged(10)
    assert engine.status().connection == "lost"


def test_an_announcement_before_the_welcome_is_refused(impostor, state):
    engine, channel, _ = impostor
    channel.send(announce(Manifest.of(state(1))))
    with pytest.raises(ChannelError, match="Announce message out of turn"):
        engine.wait_staged(10)
