"""Slots in GPU memory that processes on the same GPU, or GPUs with peer access, read directly.

The publisher writes a slot's pinned host image; `CudaIpcTransport.seal` copies it to the GPU once,
and every reader maps the same GPU allocation. The handle is torch's own record of an IPC
allocation, sent as msgpack.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from weightplane.errors import ChannelError, TransferError, TransportUnavailableError
from weightplane.p2p import Offer, check_range

NAME = "cuda_ipc"


class _Handle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What torch needs to open another process's allocation; field by field its own record."""

    device: int
    handle: bytes
    storage_bytes: int
    storage_offset: int
    counter_handle: bytes
    counter_offset: int
    event_handle: bytes
    event_sync: bool


def _require_gpu() -> None:
    if not torch.cuda.is_available():
        raise TransportUnavailableError("transport 'cuda_ipc' needs a GPU that torch can use")


class CudaIpcTransport:
    """The publisher's half.

    Args:
        slot_bytes: bytes of each slot, on the GPU and once more in pinned host memory.
        slots: number of slots.
        device: index of the GPU.

    Raises:
        TransportUnavailableError: there is no GPU.
    """

    def __init__(self, slot_bytes: int, slots: int = 2, device: int = 0) -> None:
        _require_gpu()
        self._device = device
        self._host = [
            torch.zeros(slot_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(slots)
        ]
        self._slots = [
            torch.zeros(slot_bytes, dtype=torch.uint8, device=f"cuda:{device}")
            for _ in range(slots)
        ]
        torch.cuda.synchronize(device)
        handles = tuple(_Handle(*slot.untyped_storage()._share_cuda_()) for slot in self._slots)
        self._offer = Offer(NAME, slots, slot_bytes, endpoint=msgspec.msgpack.encode(handles))

    @property
    def offer(self) -> Offer:
        """How to reach the slots."""
        return self._offer

    def buffer(self, slot: int) -> memoryview:
        """The writable bytes of a slot's host image."""
        return self._host[slot].numpy().data

    def seal(self, slot: int) -> None:
        """Copy the host image to the GPU."""
        self._slots[slot].copy_(self._host[slot])
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Let go of the slots."""
        self._slots.clear()
        self._host.clear()


class CudaIpcReader:
    """The subscriber's half.

    Args:
        offer: the publisher's.

    Raises:
        TransportUnavailableError: there is no GPU.
        TransferError: the allocations cannot be opened: another machine, or no peer access.
    """

    def __init__(self, offer: Offer) -> None:
        _require_gpu()
        try:
            handles = msgspec.msgpack.decode(offer.endpoint, type=tuple[_Handle, ...])
        except msgspec.DecodeError as error:
            raise ChannelError(f"the endpoint of a cuda_ipc offer is malformed: {error}") from None
        if len(handles) != offer.slots:
            raise ChannelError(f"the publisher offers {offer.slots} slots, {len(handles)} handles")
        self._offer = offer
        try:
            self._slots = [_open(handle, offer.slot_bytes) for handle in handles]
        except RuntimeError as error:
            raise TransferError(f"the publisher's GPU memory cannot be opened: {error}") from error

    def register(self, arena: memoryview) -> None:
        """Nothing to do: the driver copies to any host memory."""

    def read(self, slot: int, offset: int, destination: memoryview) -> None:
        """Fill ``destination`` with the bytes of ``slot`` from ``offset`` on."""
        length = len(destination)
        check_range(self._offer, slot, offset, length)
        if length:
            source = self._slots[slot][offset : offset + length]
            torch.frombuffer(destination, dtype=torch.uint8).copy_(source)

    def close(self) -> None:
        """Unmap the slots."""
        self._slots = []


def _open(handle: _Handle, slot_bytes: int) -> torch.Tensor:
    storage_type: Any = torch.UntypedStorage
    storage = storage_type._new_shared_cuda(*msgspec.structs.astuple(handle))
    flat = torch.empty(0, dtype=torch.uint8, device=f"cuda:{handle.device}")
    return flat.set_(storage)[:slot_bytes]
