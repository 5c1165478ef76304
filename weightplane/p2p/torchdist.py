"""Send and receive over ``torch.distributed``: gloo between CPUs, NCCL between GPUs.

Neither backend can read another process's memory, so the publisher serves: one thread and one
process group of two ranks for every reader, made when it joins. No collective spans more than one
reader; one that dies breaks its own group and nobody else's. Readers find the publisher through a
``TCPStore`` on the loopback interface, unless another host is named.

A read is a request (slot, offset, length; int64 [3]) and the bytes in answer. Over NCCL both go
through a buffer on the GPU, because staging buffers are host memory.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
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
_GOODBYE = -1
_FOREVER = timedelta(days=365)

# torch's type stubs do not know the classes that are made in C++.
_c10d: Any = torch.distributed
_gloo: Any = getattr(_c10d, "ProcessGroupGloo", None)
_nccl: Any = getattr(_c10d, "ProcessGroupNCCL", None)


class _Endpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The store that readers meet the publisher at, and the backend of the groups."""

    host: str
    port: int
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
        endpoint = _Endpoint(host, self._store.port, backend)
        self._offer = Offer(NAME, slots, slot_bytes, endpoint=msgspec.msgpack.encode(endpoint))
        # A client of its own, because waiting for a key keeps a client busy.
        self._acceptor_store = _c10d.TCPStore(host, self._store.port, timeout=_FOREVER)
        self._lock = threading.Lock()
        self._pairs: dict[int, _Pair] = {}
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._gate = f"close-{uuid.uuid4().hex}".encode()
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
            pairs = list(self._pairs.values())
        self._store.set(f"reader/{self._store.add('readers', 1) - 1}", self._gate)
        for pair in pairs:
            pair.group.abort()
        for thread in (self._acceptor, *self._threads):
            thread.join(timeout)
            if thread.is_alive():
                raise StalledError(f"thread {thread.name} did not end in {timeout:g} seconds")

    def _accept(self) -> None:
        """Start a thread for every reader that joins, until `close` says stop."""
        index = 0
        while self._acceptor_store.get(f"reader/{index}") != self._gate:
            with self._lock:
                if self._closed:
                    return
                self._threads = [thread for thread in self._threads if thread.is_alive()]
                thread = threading.Thread(
                    target=self._serve,
                    args=(index,),
                    name=f"weightplane-torchdist-{index}",
                    daemon=True,
                )
                self._threads.append(thread)
                thread.start()
            index += 1

    def _serve(self, index: int) -> None:
        """Answer one reader until it leaves or dies."""
        slots = [torch.frombuffer(arena.bytes, dtype=torch.uint8) for arena in self._arenas]
        request = torch.zeros(3, dtype=torch.int64)
        try:
            store = _c10d.TCPStore(self._host, self._store.port, timeout=self._join)
            pair = _Pair(store, self._host, self._backend, _PUBLISHER, index, self._join)
            with self._lock:
                if self._closed:
                    return
                self._pairs[index] = pair
            while True:
                pair.receive(request, _FOREVER)
                slot, offset, length = request.tolist()
                if slot == _GOODBYE:
                    return
                check_range(self._offer, slot, offset, length)
                pair.send(slots[slot][offset : offset + length])
        except (RuntimeError, WeightPlaneError):
            # The reader is gone, never connected, or asks for what is not there: its own read
            # fails and says so; there is nobody here to tell.
            return
        finally:
            with self._lock:
                gone = self._pairs.pop(index, None)
            if gone is not None:
                gone.group.abort()


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
        try:
            store = _c10d.TCPStore(
                endpoint.host, endpoint.port, timeout=self._timeout, wait_for_workers=False
            )
            index = store.add("readers", 1) - 1
            store.set(f"reader/{index}", b"join")
            self._pair: _Pair | None = _Pair(
                store, endpoint.host, endpoint.backend, _READER, index, self._timeout
            )
        except RuntimeError as error:
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
        if self._pair is None:
            raise TransferError("the connection to the publisher has failed before, or is closed")
        try:
            self._pair.send(torch.tensor([slot, offset, length]))
            self._pair.receive(torch.frombuffer(destination, dtype=torch.uint8), self._timeout)
        except RuntimeError as error:
            # An answer may still be on its way: the pair cannot be used again.
            self._pair.group.abort()
            self._pair = None
            raise TransferError(f"read of {length} bytes failed: {error}") from error

    def close(self) -> None:
        """Say goodbye and end the group."""
        pair, self._pair = self._pair, None
        if pair is None:
            return
        # The publisher may be gone already.
        with contextlib.suppress(RuntimeError):
            pair.send(torch.tensor([_GOODBYE, 0, 0]))
        pair.group.abort()
