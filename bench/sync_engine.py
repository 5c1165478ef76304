"""A rollout engine for `bench.sync`: commits every version as soon as it is staged.

Run as ``python -m bench.sync_engine DESCRIPTOR SHARE``, SHARE being 1 to compute with the
publisher's slots where that is possible; the layout comes as one line of stdin. After each commit
it prints one line: version, time of the commit (`time.monotonic`), pause, bytes moved.
"""

from __future__ import annotations

import json
import select
import sys

import torch

from weightplane import Channel, Layout, Subscriber, tensor_digest


def main() -> None:
    torch.set_num_threads(1)
    descriptor, share = int(sys.argv[1]), bool(int(sys.argv[2]))
    layout = Layout.from_json(sys.stdin.buffer.readline())
    channel = Channel.inherited(descriptor)
    with Subscriber(channel, layout, buffer_wait_seconds=120, share=share) as subscriber:
        poller = select.poll()
        poller.register(subscriber, select.POLLIN)
        poller.register(sys.stdin, select.POLLIN)
        while True:
            ready = {item for item, _ in poller.poll()}
            if sys.stdin.fileno() in ready:
                # Whatever it is: the bench asks what serves, and then closes.
                if not sys.stdin.buffer.readline():
                    return
                tensors = subscriber.tensors
                print(json.dumps({name: tensor_digest(item) for name, item in tensors.items()}))
                sys.stdout.flush()
            subscriber.events()
            version = subscriber.staged()
            if version is None:
                continue
            swap = subscriber.commit(version.number)
            record = next(
                item for item in subscriber.records() if item.version.number == version.number
            )
            moved = record.transfer.byte_count if record.transfer else 0
            answer = [version.number, record.committed_at, swap.pause_seconds, moved]
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
