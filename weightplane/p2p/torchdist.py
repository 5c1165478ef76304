"""Send and receive over ``torch.distributed``: gloo between CPUs, NCCL between GPUs.

Neither backend can read another process's memory, so the publisher serves: one thread and one
process group of two ranks for every reader, made when it joins. No collective spans more than one
reader; one that dies breaks its own group and nobody else's. Everything listens on the loopback
interface, unless another host is named.

A read is a request (slot, offset, length) over a TCP connection of the pair, and the bytes in
answer through the group. The connection also tells the publisher that a reader is gone, and lets it
stop waiting for one: a receive of gloo can be ended by neither side alone. Over NCCL the bytes go
through a buffer on the GPU, because staging buffers are host memory.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed

from weightplane.errors import (
    ChannelError,
    InvalidArgumentError,
    StalledError,
    TransferError,
    TransportUnavailableError,
    WeightPlaneError,
)
from weightplane.p2p import Offer, check_range
from weightplane.p2p.arena import Arena, RegisteredArenas

NAME = "torchdist"

LOOPBACK = "127.0.0.1"

_PUBLISHER, _READER = 0, 1

_INDEX = struct.Struct("!q")
_REQUEST = struct.Struct("!qqq")
# torch's type stubs do not know the classes that are made in C++.
_c10d: Any = torch.distributed
_gloo: Any = getattr(_c10d, "ProcessGroupGloo", None)
_nccl: Any = getattr(_c10d, "ProcessGroupNCCL", None)


class _Endpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where readers ask, the port of the store where groups form, and the groups' backend."""

    host: str
    port: int
    store: int
    backend: str


class _Pair:
    """A process group of one publisher and one reader."""

    def __init__(
        self, store: Any, host: str, backend: str, rank: int, index: int, timeout: timedelta
    ) -> None:
        prefixed = _c10d.PrefixStore(f"pair/{index}", store)
        self._device = torch.device("cpu")
        if backend == "nccl":
            self._device = torch.device("cuda", torch.cuda.current_device())
            self.group = _nccl(prefixed, rank, 2, timeout)
        else:
            options = _gloo._Options()
            device = _gloo.create_device(hostname=host)
            options._devices = [device]
            options._timeout = timeout
            self.group = _gloo(prefixed, rank, 2, options)
        self._peer = 1 - rank

    def send(self, tensor: torch.Tensor) -> None:
        """Send a CPU tensor; returns when it is on its way."""
        self.group.send([tensor.to(self._device)], self._peer, 0).wait()
        self._settle()

    def receive(self, tensor: torch.Tensor, timeout: timedelta) -> None:
        """Fill a CPU tensor with what the peer sends."""
        landing = tensor if self._device.type == "cpu" else torch.empty_like(
            tensor, device=self._device
        )  # fmt: skip
        self.group.recv([landing], self._peer, 0).wait(timeout)
        self._settle()
        if landing is not tensor:
            tensor.copy_(landing)

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _require_backend(backend: str) -> None:
    if backend not in ("gloo", "nccl"):
        raise InvalidArgumentError(f"backend is {backend!r}; use 'gloo' or 'nccl'")
    if backend == "nccl" and not (
        torch.cuda.is_available() and torch.distributed.is_nccl_available()
    ):
        raise TransportUnavailableError("backend 'nccl' needs a GPU and a torch built with NCCL")
    if backend == "gloo" and not torch.distributed.is_gloo_available():
        raise TransportUnavailableError("this torch was built without gloo")


class TorchDistTransport:
    """The publisher's half.

    Args:
        slot_bytes: bytes of each slot.
        slots: number of slots.
        backend: ``"gloo"`` or ``"nccl"``.
        host: the address that readers connect to; loopback by default.
        join_seconds: how long a reader that has announced itself may take to connect.

    Raises:
        TransportUnavailableError: the backend cannot run here.
    """

    def __init__(
        self,
        slot_bytes: int,
        slots: int = 2,
        backend: str = "gloo",
        host: str = LOOPBACK,
        join_seconds: float = 20.0,
    ) -> None:
        _require_backend(backend)
        self._host, self._backend = host, backend
        self._join = timedelta(seconds=join_seconds)
        self._arenas = [Arena(slot_bytes) for _ in range(slots)]
        self._store = _c10d.TCPStore(
            host, 0, None, is_master=True, timeout=self._join, wait_for_workers=False
        )
        self._door = socket.create_server((host, 0))
        endpoint = _Endpoint(host, self._door.getsockname()[1], self._store.port, backend)
        self._offer = Offer(NAME, slots, slot_bytes, endpoint=msgspec.msgpack.encode(endpoint))
        self._lock = threading.Lock()
        self._requests: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._acceptor = threading.Thread(
            target=self._accept, name="weightplane-torchdist", daemon=True
        )
        self._acceptor.start()

    @property
    def offer(self) -> Offer:
        """How to reach the slots."""
        return self._offer

    def buffer(self, slot: int) -> memoryview:
        """The writable bytes of a slot."""
        return self._arenas[slot].bytes

    def seal(self, slot: int) -> None:
        """Nothing to do: the bytes are read when a reader asks for them."""

    def close(self, timeout: float = 10.0) -> None:
        """End every group and thread.

        Raises:
            StalledError: a thread did not end within ``timeout`` seconds.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for requests in self._requests:
                _shut(requests)
        _shut(self._door)
        for thread in (self._acceptor, *self._threads):
            thread.join(timeout)
            if thread.is_alive():
                raise StalledError(f"thread {thread.name} did not end in {timeout:g} seconds")
        self._door.close()

    def _accept(self) -> None:
        """Start a thread for every reader that joins, until `close` shuts the door."""
        index = 0
        while True:
            try:
                requests, _ = self._door.accept()
            except OSError:
                return
            with self._lock:
                if self._closed:
                    requests.close()
                    return
                self._requests.add(requests)
                self._threads = [thread for thread in self._threads if thread.is_alive()]
                thread = threading.Thread(
                    target=self._serve,
                    args=(requests, index),
                    name=f"weightplane-torchdist-{index}",
                    daemon=True,
                )
                self._threads.append(thread)
                thread.start()
            index += 1

    def _serve(self, requests: socket.socket, index: int) -> None:
        """Answer one reader until it leaves or dies."""
        slots = [torch.frombuffer(arena.bytes, dtype=torch.uint8) for arena in self._arenas]
        pair: _Pair | None = None
        try:
            requests.sendall(_INDEX.pack(index))
            store = _c10d.TCPStore(self._host, self._store.port, timeout=self._join)
            pair = _Pair(store, self._host, self._backend, _PUBLISHER, index, self._join)
            while request := _receive(requests, _REQUEST.size):
                slot, offset, length = _REQUEST.unpack(request)
                check_range(self._offer, slot, offset, length)
                pair.send(slots[slot][offset : offset + length])
        except (OSError, RuntimeError, WeightPlaneError):
            # The reader is gone, never connected, or asks for what is not there: its own read
            # fails and says so; there is nobody here to tell.
            return
        finally:
            with self._lock:
                self._requests.discard(requests)
            requests.close()
            if pair is not None:
                pair.group.abort()


class TorchDistReader:
    """The subscriber's half.

    Args:
        offer: the publisher's.
        stall_seconds: a read that is not done by then has failed.

    Raises:
        TransferError: the publisher cannot be reached.
        TransportUnavailableError: the backend cannot run here.
    """

    def __init__(self, offer: Offer, stall_seconds: float = 20.0) -> None:
        try:
            endpoint = msgspec.msgpack.decode(offer.endpoint, type=_Endpoint)
        except msgspec.DecodeError as error:
            raise ChannelError(f"the endpoint of a torchdist offer is malformed: {error}") from None
        _require_backend(endpoint.backend)
        self._offer = offer
        self._timeout = timedelta(seconds=stall_seconds)
        self._arenas = RegisteredArenas()
        self._requests: socket.socket | None = None
        try:
            self._requests = socket.create_connection(
                (endpoint.host, endpoint.port), timeout=stall_seconds
            )
            answer = _receive(self._requests, _INDEX.size)
            if not answer:
                raise TransferError("the publisher closed the connection")
            store = _c10d.TCPStore(
                endpoint.host, endpoint.store, timeout=self._timeout, wait_for_workers=False
            )
            (index,) = _INDEX.unpack(answer)
            self._pair = _Pair(
                store, endpoint.host, endpoint.backend, _READER, index, self._timeout
            )
        except (OSError, RuntimeError) as error:
            if self._requests is not None:
                self._requests.close()
            raise TransferError(
                f"the publisher at {endpoint.host}:{endpoint.port} cannot be reached: {error}"
            ) from error

    def register(self, arena: memoryview) -> None:
        """Remember the buffer; gloo registers nothing."""
        self._arenas.add(arena)

    def read(self, slot: int, offset: int, destination: memoryview) -> None:
        """Fill ``destination`` with the bytes of ``slot`` from ``offset`` on."""
        length = len(destination)
        check_range(self._offer, slot, offset, length)
        self._arenas.require(destination)
        if not length:
            return
        if self._requests is None:
            raise TransferError("the connection to the publisher has failed before, or is closed")
        try:
            self._requests.sendall(_REQUEST.pack(slot, offset, length))
            self._pair.receive(torch.frombuffer(destination, dtype=torch.uint8), self._timeout)
        except (OSError, RuntimeError) as error:
            # An answer may still be on its way: the pair cannot be used again.
            self.close()
            raise TransferError(f"read of {length} bytes failed: {error}") from error

    def close(self) -> None:
        """End the group; the publisher sees the connection close."""
        requests, self._requests = self._requests, None
        if requests is not None:
            requests.close()
            self._pair.group.abort()


def _receive(connection: socket.socket, count: int) -> bytes:
    """Exactly ``count`` bytes, or none if the other end is gone."""
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            return b""
        data += more
    return data


def _shut(connection: socket.socket) -> None:
    """Wake whoever waits on a socket in another thread."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
