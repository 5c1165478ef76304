"""One-sided reads through NVIDIA's NIXL (package ``nixl-cu12``), over UCX by default.

The publisher registers each slot once and puts its agent's metadata and the slots' addresses into
the offer; a reader registers each staging buffer once and reads without the publisher's taking
part. On a machine without RDMA, UCX moves the bytes over shared memory or TCP.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from weightplane.errors import (
    ChannelError,
    TransferError,
    TransportUnavailableError,
    WeightPlaneError,
)
from weightplane.p2p import Offer, check_range
from weightplane.p2p.arena import Arena, RegisteredArenas

NAME = "nixl"

_SPIN_SECONDS = 0.0005
"""How long to look for the end of a transfer without sleeping; short reads end within it."""

_SLEEP_SECONDS = 0.0002


class _Endpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The publisher's agent, as NIXL describes it, and the address of each slot."""

    metadata: bytes
    addresses: tuple[int, ...]


_UCX_MODULES = "UCX_MODULES"

_RDMA_DEVICES = Path("/sys/class/infiniband")


@contextlib.contextmanager
def _ucx_modules() -> Iterator[None]:
    """Keep UCX from loading its InfiniBand module where there is no RDMA device.

    That module brings the wheel's own copies of libibverbs and libnl beside the system's; with both
    in one process, libnl's destructor reads a broken list and the process ends in a segmentation
    fault (seen with nixl-cu12 1.5.1 and Debian's libnl 3.7). UCX takes its list of modules from the
    environment alone, when it is loaded; a list that the user has set is left as it is.
    """
    if _UCX_MODULES in os.environ or (_RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())):
        yield
        return
    os.environ[_UCX_MODULES] = "^ib"
    try:
        yield
    finally:
        del os.environ[_UCX_MODULES]


def _agent(role: str, backend: str) -> Any:
    try:
        api = importlib.import_module("nixl_cu12._api")
    except ImportError as error:
        raise TransportUnavailableError(
            f"transport 'nixl' needs the package nixl-cu12 ({error}): pip install lockstep-rl[p2p]"
        ) from error
    # Agents are found by name, so a name must never be used twice.
    name = f"lockstep-{role}-{os.getpid()}-{uuid.uuid4().hex}"
    try:
        with _ucx_modules():
            agent = api.nixl_agent(name, api.nixl_agent_config(backends=[backend]))
    except Exception as error:
        raise TransportUnavailableError(
            f"NIXL cannot start its {backend} backend here: {error!r}"
        ) from error
    if backend not in agent.backends:
        raise TransportUnavailableError(
            f"NIXL has no backend {backend!r} here; it has {', '.join(agent.plugin_list)}"
        )
    return agent


class NixlTransport:
    """The publisher's half.

    Args:
        slot_bytes: bytes of each slot.
        slots: number of slots.
        backend: the NIXL plugin that moves the bytes.

    Raises:
        TransportUnavailableError: NIXL or its backend cannot run here.
    """

    def __init__(self, slot_bytes: int, slots: int = 2, backend: str = "UCX") -> None:
        self._arenas = [Arena(slot_bytes) for _ in range(slots)]
        self._agent: Any = _agent("publisher", backend)
        regions = [(arena.address, slot_bytes, 0, "") for arena in self._arenas]
        self._registered = self._agent.register_memory(regions, "DRAM")
        endpoint = _Endpoint(
            self._agent.get_agent_metadata(), tuple(arena.address for arena in self._arenas)
        )
        self._offer = Offer(NAME, slots, slot_bytes, endpoint=msgspec.msgpack.encode(endpoint))
        self._closed = False

    @property
    def offer(self) -> Offer:
        """How to reach the slots."""
        return self._offer

    def buffer(self, slot: int) -> memoryview:
        """The writable bytes of a slot."""
        return self._arenas[slot].bytes

    def seal(self, slot: int) -> None:
        """Nothing to do: readers read the slot's own memory."""

    def close(self) -> None:
        """Deregister the slots and end the agent."""
        if not self._closed:
            self._closed = True
            self._agent.deregister_memory(self._registered)
            self._agent = None


class NixlReader:
    """The subscriber's half.

    Args:
        offer: the publisher's.
        backend: the NIXL plugin that moves the bytes.
        stall_seconds: a read that is not done by then has failed.

    Raises:
        TransportUnavailableError: NIXL or its backend cannot run here.
        TransferError: the publisher cannot be reached.
    """

    def __init__(self, offer: Offer, backend: str = "UCX", stall_seconds: float = 20.0) -> None:
        try:
            endpoint = msgspec.msgpack.decode(offer.endpoint, type=_Endpoint)
        except msgspec.DecodeError as error:
            raise ChannelError(f"the endpoint of a NIXL offer is malformed: {error}") from None
        if len(endpoint.addresses) != offer.slots:
            raise ChannelError(
                f"the publisher offers {offer.slots} slots and {len(endpoint.addresses)} addresses"
            )
        self._offer = offer
        self._addresses = endpoint.addresses
        self._stall_seconds = stall_seconds
        self._agent: Any = _agent("subscriber", backend)
        self._arenas = RegisteredArenas()
        self._registered: list[Any] = []
        try:
            self._peer = self._agent.add_remote_agent(endpoint.metadata)
        except Exception as error:
            raise TransferError(f"NIXL cannot reach the publisher: {error!r}") from error

    def register(self, arena: memoryview) -> None:
        """Register a staging buffer with NIXL, once."""
        address, length = self._arenas.add(arena)
        self._registered.append(self._agent.register_memory([(address, length, 0, "")], "DRAM"))

    def read(self, slot: int, offset: int, destination: memoryview) -> None:
        """Fill ``destination`` with the bytes of ``slot`` from ``offset`` on."""
        length = len(destination)
        check_range(self._offer, slot, offset, length)
        address = self._arenas.require(destination)
        if not length:
            return
        agent, remote = self._agent, self._addresses[slot] + offset
        what = f"NIXL read of {length} bytes"
        handle = None
        try:
            handle = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs([(address, length, 0)], "DRAM"),
                agent.get_xfer_descs([(remote, length, 0)], "DRAM"),
                self._peer,
            )
            begun = time.monotonic()
            state = agent.transfer(handle)
            while state not in ("DONE", "ERR"):
                waited = time.monotonic() - begun
                if waited > self._stall_seconds:
                    raise TransferError(f"{what}: not done after {self._stall_seconds:g} seconds")
                time.sleep(0 if waited < _SPIN_SECONDS else _SLEEP_SECONDS)
                state = agent.check_xfer_state(handle)
            if state == "ERR":
                raise TransferError(f"{what} failed: the publisher is gone or refuses")
        except WeightPlaneError:
            raise
        except Exception as error:
            raise TransferError(f"{what} failed: {error!r}") from error
        finally:
            if handle is not None:
                # A failed transfer may refuse to be released; the agent frees it in the end.
                with contextlib.suppress(Exception):
                    agent.release_xfer_handle(handle)

    def close(self) -> None:
        """Deregister the buffers and end the agent."""
        agent, self._agent = self._agent, None
        if agent is None:
            return
        for registered in self._registered:
            agent.deregister_memory(registered)
        self._registered.clear()
        # A peer that is dead already cannot be told.
        with contextlib.suppress(Exception):
            agent.remove_remote_agent(self._peer)
