"""The publisher's half of any transport in a process of its own, to be killed by a test."""

from __future__ import annotations

import json
import sys

from weightplane.p2p.readers import make_transport


def main() -> None:
    transport = make_transport(sys.argv[1], int(sys.argv[2]), 2)
    for slot in range(2):
        view = transport.buffer(slot)
        view[:] = bytes([slot + 1]) * len(view)
        transport.seal(slot)
    offer = transport.offer
    print(json.dumps([offer.slots, offer.slot_bytes, offer.endpoint.hex()]), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
