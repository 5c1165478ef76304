"""Every transport by its name. A transport's package is imported when it is first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from weightplane.errors import InvalidArgumentError
from weightplane.p2p import Offer, Reader, Transport
from weightplane.p2p.cuda_ipc import CudaIpcReader, CudaIpcTransport
from weightplane.p2p.mooncake import MooncakeReader, MooncakeTransport
from weightplane.p2p.nixl import NixlReader, NixlTransport
from weightplane.p2p.shm import ShmReader, ShmTransport
from weightplane.p2p.torchdist import TorchDistReader, TorchDistTransport

READERS: Mapping[str, Callable[[Offer], Reader]] = MappingProxyType(
    {
        "shm": ShmReader,
        "torchdist": TorchDistReader,
        "nixl": NixlReader,
        "mooncake": MooncakeReader,
        "cuda_ipc": CudaIpcReader,
    }
)
"""The subscriber's half of every transport, by the name in the publisher's offer."""

TRANSPORTS: Mapping[str, Callable[[int, int], Transport]] = MappingProxyType(
    {
        "shm": ShmTransport,
        "torchdist": TorchDistTransport,
        "nixl": NixlTransport,
        "mooncake": MooncakeTransport,
        "cuda_ipc": CudaIpcTransport,
    }
)
"""The publisher's half of every transport with its default settings: (slot_bytes, slots)."""


def make_transport(name: str, slot_bytes: int, slots: int = 2) -> Transport:
    """The publisher's half of transport ``name``.

    Raises:
        InvalidArgumentError: no transport has that name.
        TransportUnavailableError: it cannot run here.
    """
    make = TRANSPORTS.get(name)
    if make is None:
        raise InvalidArgumentError(f"transport is {name!r}; use one of {', '.join(TRANSPORTS)}")
    return make(slot_bytes, slots)
