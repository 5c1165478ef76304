"""A small cluster of real processes that are killed at random; see `test_kills`.

One process imports everything and forks the others, so that a restart takes milliseconds. The
roles:

- the *publisher* publishes a new version every few milliseconds at a Unix socket;
- the *relay* receives them and serves them on at another;
- the *engines* take versions from the relay, or from the publisher while there is no relay, commit
  what the coordinator says, and in every turn write a *token*: the number of the version and a
  digest of the weights as they lie in memory;
- the *coordinator* lets all commit a version that every living engine has staged.

The weights of a version are a function of its number, so whoever reads the tokens knows what each
digest must be.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys
import threading
import time
from pathlib import Path

import torch
import xxhash

from weightplane import (
    Address,
    ChannelError,
    Connection,
    Gateway,
    Layout,
    Publisher,
    Relay,
    Subscriber,
    WeightPlaneError,
    WireSettings,
    connect,
)

SECRET = b"the secret of one test's cluster"
SETTINGS = WireSettings(SECRET, heartbeat_seconds=0.5, stall_seconds=5.0)
ENGINES = 2
TOKEN = struct.Struct("<dq16s")
COMMIT = struct.Struct("<qq")


def weights(number: int) -> dict[str, torch.Tensor]:
    """Version ``number``: half of the tensors change with every version, by their number."""
    generator = torch.Generator().manual_seed(number)
    return {
        f"layer.{index}": torch.randn(64, 128, generator=generator).bfloat16() for index in range(8)
    }


def fingerprint(tensors) -> bytes:
    """Digest of all weights, in the order of the names."""
    hasher = xxhash.xxh3_128()
    for name in sorted(tensors):
        hasher.update(tensors[name].view(torch.uint8).numpy().data)
    return hasher.digest()


LAYOUT = Layout.of(weights(0))


def publisher(folder: Path) -> None:
    """Numbers go on after a restart: the next one is on disk before it is used."""
    counter = folder / "number"
    with Publisher(LAYOUT, stall_seconds=2.0, deltas=True) as source:
        Gateway(Address("", 0, str(folder / "publisher")), SETTINGS, source.attach)
        while True:
            number = int(counter.read_text()) + 1 if counter.exists() else 0
            temporary = counter.with_suffix(".new")
            temporary.write_text(str(number))
            temporary.replace(counter)
            with contextlib.suppress(WeightPlaneError):
                source.publish(weights(number), number)
            time.sleep(0.03)


def attach(folder: Path, names: list[str]):
    """A connection to the first that answers."""
    while True:
        for name in names:
            with contextlib.suppress(ChannelError):
                return connect(Address("", 0, str(folder / name)), SETTINGS, 1.0)
        time.sleep(0.02)


def relay(folder: Path) -> None:
    link = attach(folder, ["publisher"])
    node = Relay(link.channel, LAYOUT)
    Gateway(Address("", 0, str(folder / "relay")), SETTINGS, node.publisher.attach)
    while not node.failure:
        if node.subscriber.status().connection is Connection.LOST:
            link.close()
            link = attach(folder, ["publisher"])
            node.reattach(link.channel)
        time.sleep(0.02)
    sys.exit(node.failure)


def engine(folder: Path, index: int) -> None:
    """The main loop is the token boundary: it commits, or writes a token."""
    sources = ["relay", "publisher"] if index == 0 else ["publisher", "relay"]
    link = attach(folder, sources)
    boss: socket.socket | None = None
    told = -1
    with (
        Subscriber(link.channel, LAYOUT, name=f"engine-{index}", stage_ahead=3) as subscriber,
        (folder / f"tokens-{index}").open("ab", buffering=0) as tokens,
    ):
        while True:
            if subscriber.status().connection is Connection.LOST:
                link.close()
                link = attach(folder, sources)
                subscriber.reattach(link.channel)
            boss, told = talk(folder, boss, index, subscriber, told)
            staged = {version.number for version in subscriber.status().staged}
            if told in staged:
                subscriber.commit(told)
            if subscriber.active is not None:
                number = subscriber.active.number
                tokens.write(TOKEN.pack(time.monotonic(), number, fingerprint(subscriber.tensors)))
            time.sleep(0.002)


def talk(folder: Path, boss: socket.socket | None, index: int, subscriber, told: int):
    """Tell the coordinator what is staged; hear what to commit. Both may be gone at any moment."""
    try:
        if boss is None:
            boss = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            boss.connect(str(folder / "coordinator"))
            boss.setblocking(False)
        staged = [version.number for version in subscriber.status().staged]
        active = subscriber.active.number if subscriber.active else -1
        boss.send(json.dumps([index, active, staged]).encode())
        with contextlib.suppress(BlockingIOError):
            while data := boss.recv(COMMIT.size):
                told = COMMIT.unpack(data)[0]
    except BlockingIOError:
        pass
    except OSError:
        if boss is not None:
            boss.close()
        return None, told
    return boss, told


def coordinator(folder: Path) -> None:
    """The newest version that every engine heard from in the last half second can commit."""
    path = folder / "coordinator"
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(16)
    heard: dict[int, tuple[float, int, list[int]]] = {}
    lock = threading.Lock()

    def serve(peer: socket.socket) -> None:
        last = -1
        with contextlib.suppress(OSError):
            while data := peer.recv(65536):
                index, active, staged = json.loads(data)
                now = time.monotonic()
                with lock:
                    heard[index] = (now, active, staged)
                    alive = [item for item in heard.values() if now - item[0] < 0.5]
                common = set.intersection(*({*item[2], item[1]} for item in alive))
                newest = max(common, default=-1)
                if newest > max(last, active):
                    last = newest
                    peer.send(COMMIT.pack(newest, 0))
        peer.close()

    while True:
        peer, _ = listener.accept()
        threading.Thread(target=serve, args=(peer,), daemon=True).start()


ROLES = {
    "publisher": publisher,
    "relay": relay,
    "coordinator": coordinator,
    **{
        f"engine-{index}": lambda folder, index=index: engine(folder, index)
        for index in range(ENGINES)
    },
}


def main() -> None:
    """Fork what stdin names; answer with its process id. Children die with their signals only."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        name = line.strip()
        process = os.fork()
        if process == 0:
            sys.stdin.close()
            sys.stderr = (folder / f"{name}.log").open("a")
            try:
                ROLES[name](folder)
            finally:
                import traceback

                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
        print(process, flush=True)


if __name__ == "__main__":
    main()
