"""What `bench.sync` compares with, measured in the same run: memcpy, loopback, and two peers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import numpy
import torch
import torch.distributed

REPEATS = 5
_CHUNK = 4 << 20


def memcpy_rate(size: int) -> float:
    """Bytes per second of one thread copying between two touched buffers; the best of a few."""
    source = numpy.ones(size, numpy.uint8)
    target = numpy.zeros(size, numpy.uint8)
    best = float("inf")
    for _ in range(REPEATS):
        begun = time.perf_counter()
        numpy.copyto(target, source)
        best = min(best, time.perf_counter() - begun)
    return size / best


def loopback_rate(size: int) -> float:
    """Bytes per second of one TCP stream over the loopback interface between two processes."""
    code = (
        "import socket, sys\n"
        "stream = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
        "size, buffer = int(sys.argv[2]), bytearray(4 << 20)\n"
        "for _ in range(int(sys.argv[3])):\n"
        "    left = size\n"
        "    while left:\n"
        "        left -= stream.recv_into(buffer, min(left, len(buffer)))\n"
        "    stream.sendall(b'.')\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        arguments = [str(port), str(size), str(REPEATS)]
        child = subprocess.Popen([sys.executable, "-c", code, *arguments])
        stream, _ = server.accept()
        with stream:
            data = numpy.ones(_CHUNK, numpy.uint8).data
            best = float("inf")
            for _ in range(REPEATS):
                begun = time.perf_counter()
                for start in range(0, size, _CHUNK):
                    stream.sendall(data[: min(_CHUNK, size - start)])
                stream.recv(1)
                best = min(best, time.perf_counter() - begun)
        child.wait()
    return size / best


def peer_main(kind: str, place: str, replicas: int, rank: int, rounds: int) -> None:
    """One receiver of a peer, in a process of its own; started by `peer_seconds`."""
    torch.set_num_threads(1)
    facts = torch.load(Path(place) / "specs.pt", weights_only=True)
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in facts.items()}
    group = _join(place, rank, replicas + 1)
    for number in range(rounds):
        group.barrier().wait()
        if kind == "gloo broadcast":
            for tensor in tensors.values():
                group.broadcast(tensor).wait()
        else:
            from safetensors.torch import load_file

            group.barrier().wait()
            loaded = load_file(Path(place) / f"{number}.safetensors")
            for name, tensor in tensors.items():
                tensor.copy_(loaded[name])
            del loaded
        group.barrier().wait()


def peer_seconds(
    kind: str, state: Mapping[str, torch.Tensor], replicas: int, rounds: int
) -> list[float]:
    """Seconds per update until every receiver has the new weights in its own tensors.

    Args:
        kind: ``"gloo broadcast"``: every tensor broadcast in full. ``"safetensors"``: saved to the
            temporary directory, loaded and copied into place by every receiver.
        state: what is moved.
        replicas: receivers.
        rounds: updates.
    """
    with tempfile.TemporaryDirectory() as place:
        facts = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}
        torch.save(facts, Path(place) / "specs.pt")
        children = [
            subprocess.Popen(
                [
                    sys.executable, "-m", "bench.sync_references",
                    kind, place, str(replicas), str(rank + 1), str(rounds),
                ],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(replicas)
        ]  # fmt: skip
        group = _join(place, 0, replicas + 1)
        seconds = []
        for number in range(rounds):
            group.barrier().wait()
            begun = time.perf_counter()
            if kind == "gloo broadcast":
                for tensor in state.values():
                    group.broadcast(tensor).wait()
            else:
                from safetensors.torch import save_file

                save_file(dict(state), Path(place) / f"{number}.safetensors")
                group.barrier().wait()
            group.barrier().wait()
            seconds.append(time.perf_counter() - begun)
            (Path(place) / f"{number}.safetensors").unlink(missing_ok=True)
        for child in children:
            if child.wait(60):
                raise RuntimeError(f"a receiver of {kind} ended with {child.returncode}")
    return seconds


class _Group:
    """The two collectives that the peers need."""

    def barrier(self) -> torch.distributed.Work:
        """Wait for everybody."""
        return _done(torch.distributed.barrier(async_op=True))

    def broadcast(self, tensor: torch.Tensor) -> torch.distributed.Work:
        """From rank 0 to everybody."""
        return _done(torch.distributed.broadcast(tensor, 0, async_op=True))


def _done(work: torch.distributed.Work | None) -> torch.distributed.Work:
    if work is None:
        raise RuntimeError("torch.distributed is not initialised")
    return work


def _join(place: str, rank: int, ranks: int) -> _Group:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{place}/rendezvous", rank=rank, world_size=ranks
    )
    return _Group()


if __name__ == "__main__":
    peer_main(sys.argv[1], sys.argv[2], *(int(item) for item in sys.argv[3:6]))
