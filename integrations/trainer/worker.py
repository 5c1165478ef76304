"""Entry point of a worker process: `python -m integrations.trainer.worker ROLE --control-fd N`.

The control socket is read by a thread of its own, so that the controller can always deliver, and
its end of file ends this process at once, whatever the main thread is doing: a worker never
outlives its controller.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import signal
import socket
import sys
import threading
import traceback

from consistency.errors import ConsistencyError
from integrations.errors import IntegrationError
from integrations.trainer.launcher import (
    FRAME_LIMIT_BYTES,
    LISTEN_SECONDS,
    SEND_TIMEOUT_SECONDS,
)
from integrations.trainer.messages import FromWorker, ToWorker, WorkerFailed
from weightplane.channel import Channel
from weightplane.errors import ChannelError, StalledError, WeightPlaneError

EXIT_CONTROLLER_GONE = 3
EXIT_FAILED = 4

# Errors whose text alone tells a person what to do; anything else also sends its traceback.
EXPECTED_ERRORS = (ConsistencyError, IntegrationError, WeightPlaneError, OSError, MemoryError)


class ControlLink:
    """The worker's side of the control socket: an inbox filled by a thread, and `send`."""

    def __init__(self, channel: Channel) -> None:
        self._inbox: queue.SimpleQueue[ToWorker] = queue.SimpleQueue()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._channel = channel
        self._send_lock = threading.Lock()
        threading.Thread(target=self._listen, name="control", daemon=True).start()

    def send(self, message: FromWorker) -> None:
        """Deliver one message; ends the process when the controller is gone."""
        try:
            with self._send_lock:
                self._channel.send(message, timeout=SEND_TIMEOUT_SECONDS)
        except (ChannelError, StalledError):
            os._exit(EXIT_CONTROLLER_GONE)

    def fileno(self) -> int:
        """Readable while messages wait, for a `select` over several sources."""
        return self._wakeup

    def receive(self) -> ToWorker:
        """The next message; waits for it."""
        return self._inbox.get()

    def drain(self) -> list[ToWorker]:
        """Every message that has arrived."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wakeup)
        messages: list[ToWorker] = []
        with contextlib.suppress(queue.Empty):
            while True:
                messages.append(self._inbox.get_nowait())
        return messages

    def _listen(self) -> None:
        while True:
            try:
                arrived = self._channel.receive(LISTEN_SECONDS)
            except StalledError:
                continue
            except (ChannelError, OSError):
                # The main thread may be inside a long kernel; only _exit ends it now.
                os._exit(EXIT_CONTROLLER_GONE)
            for received in arrived:
                self._inbox.put(received.message)
            os.eventfd_write(self._wakeup, 1)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="integrations.trainer.worker")
    parser.add_argument("role", choices=["learner", "rollout"])
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--weights-fd", type=int, action="append", default=[])
    options = parser.parse_args(arguments)
    # Ctrl-C reaches the whole process group; only the controller acts on it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(
        socket.socket(fileno=options.control_fd),
        message_type=ToWorker,
        max_message_bytes=FRAME_LIMIT_BYTES,
    )
    link = ControlLink(channel)
    weight_sockets = [socket.socket(fileno=descriptor) for descriptor in options.weights_fd]
    try:
        if options.role == "learner":
            from integrations.trainer.worker_learner import run_learner

            run_learner(link, weight_sockets)
        else:
            from integrations.trainer.worker_rollout import run_rollout

            run_rollout(link, weight_sockets)
    except EXPECTED_ERRORS as error:
        traceback.print_exc()
        link.send(WorkerFailed(_one_line(error)))
        return EXIT_FAILED
    except Exception as error:
        details = traceback.format_exc()
        sys.stderr.write(details)
        link.send(WorkerFailed(f"{type(error).__name__}: {_one_line(error)}", details))
        return EXIT_FAILED
    return 0


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


if __name__ == "__main__":
    # Threads of the kernels and of the weight plane may still run; nothing is left to flush but
    # the standard streams.
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
