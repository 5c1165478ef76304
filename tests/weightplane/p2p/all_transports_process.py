"""One process that opens the named transports and ends by itself: its exit status is the test."""

from __future__ import annotations

import os
import sys

from weightplane.p2p import Offer
from weightplane.p2p.arena import Arena
from weightplane.p2p.readers import READERS, make_transport

SLOT_BYTES = 1 << 16


def main(names: list[str]) -> None:
    for name in names:
        transport = make_transport(name, SLOT_BYTES, 2)
        offer = transport.offer
        descriptors = tuple(os.dup(descriptor) for descriptor in offer.descriptors)
        reader = READERS[name](
            Offer(name, offer.slots, offer.slot_bytes, descriptors, offer.endpoint)
        )
        arena = Arena(SLOT_BYTES)
        reader.register(arena.bytes)
        transport.buffer(1)[:] = bytes([7]) * SLOT_BYTES
        transport.seal(1)
        reader.read(1, 0, arena.bytes)
        if bytes(arena.bytes) != bytes(transport.buffer(1)):
            raise SystemExit(f"{name} read other bytes")
        reader.close()
        transport.close()


if __name__ == "__main__":
    main(sys.argv[1:])
