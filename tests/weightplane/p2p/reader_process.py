"""A reader of any transport in a process of its own: ranges of slots, as hex, by JSON lines."""

from __future__ import annotations

import json
import sys

import msgspec

from weightplane import WeightPlaneError
from weightplane.p2p import Offer
from weightplane.p2p.arena import Arena
from weightplane.p2p.readers import READERS


def main() -> None:
    name, slots, slot_bytes, endpoint = sys.stdin.readline().split()
    offer = Offer(name, int(slots), int(slot_bytes), endpoint=bytes.fromhex(endpoint))
    reader = READERS[name](offer)
    arena = Arena(offer.slot_bytes)
    reader.register(arena.bytes)
    print("ready", flush=True)
    for line in sys.stdin:
        slot, offset, length = json.loads(line)
        try:
            reader.read(slot, offset, arena.bytes[:length])
            answer = {"bytes": bytes(arena.bytes[:length]).hex()}
        except WeightPlaneError as error:
            answer = {"error": type(error).__name__}
        print(msgspec.json.encode(answer).decode(), flush=True)
    reader.close()
    print("closed", flush=True)


if __name__ == "__main__":
    main()
