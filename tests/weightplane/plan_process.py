"""One endpoint of a plan in a process of its own, driven by JSON lines."""

from __future__ import annotations

import json
import os
import sys

import numpy
import xxhash

from tests.weightplane.planning import empty_arenas, filled_arenas, random_sides, random_values
from weightplane import WeightPlaneError
from weightplane.p2p import Offer
from weightplane.plan import PlanSettings, plan
from weightplane.plan_transfer import PlanEndpoint


def main() -> None:
    seed, endpoint, transport = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    source, destination = random_sides(seed)
    made = plan(source, destination, PlanSettings(chunk_bytes=64, allow_unused=True))
    node = PlanEndpoint(made, endpoint, transport, stall_seconds=1.5)
    offer = node.offer
    facts = [offer.slots, offer.slot_bytes, offer.endpoint.hex(), made.digest]
    print(json.dumps(facts), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "offers" in request:
                node.connect(
                    {
                        int(key): Offer(transport, slots, size, endpoint=bytes.fromhex(place))
                        for key, (slots, size, place) in request["offers"].items()
                    }
                )
                answer = [True]
            elif endpoint < source.size:
                values = random_values(source, request["version"])
                node.publish(filled_arenas(source, values)[endpoint], request["version"])
                answer = [True]
            else:
                arena = empty_arenas(destination)[endpoint - source.size]
                got = node.receive(arena, request["version"])
                digest = xxhash.xxh3_128_hexdigest(numpy.ascontiguousarray(arena).data)
                answer = [digest, got.byte_count, got.from_others]
        except WeightPlaneError as error:
            answer = [type(error).__name__, str(error)]
        print(json.dumps(answer), flush=True)
    # Native libraries may end slowly; everything that matters has been said.
    os._exit(0)


if __name__ == "__main__":
    main()
