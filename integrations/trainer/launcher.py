"""Starts worker processes and makes sure that none outlives the run.

A worker is a fresh interpreter (`python -m integrations.trainer.worker ROLE`) that inherits one end
of a socket pair and nothing else. Three things tie its life to the controller's: it exits when its
control socket reports end of file (the kernel closes it even when the controller is killed), the
controller stops it when the run ends for any reason, and a worker that does not stop is killed.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from integrations.errors import WorkerLostError
from integrations.trainer.messages import FromWorker, Stop, ToWorker
from weightplane.channel import Channel, channel_pair
from weightplane.errors import ChannelClosedError, ChannelError, StalledError

STOP_GRACE_SECONDS = 10.0
# A worker's control thread does nothing but read, so a full socket means that it is stopped.
SEND_TIMEOUT_SECONDS = 30.0
LISTEN_SECONDS = 3600.0
JOIN_SECONDS = 5.0
# A single trajectory with its routing trace must fit in one frame.
FRAME_LIMIT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """Put into the inbox when a worker's control socket ends."""

    reason: str


@dataclass(slots=True)
class Worker:
    """One worker process seen from the controller.

    Attributes:
        name: for people, for example `learner` or `rollout-0`.
        last_message_at: `time.monotonic()` of the last frame that arrived.
        waiting_for: what the controller expects of it, or an empty string.
    """

    name: str
    process: subprocess.Popen[bytes]
    channel: Channel
    log: Path
    last_message_at: float = field(default_factory=time.monotonic)
    waiting_for: str = ""

    def send(self, message: ToWorker) -> None:
        """Deliver one message.

        Raises:
            WorkerLostError: the worker is gone.
        """
        try:
            self.channel.send(message, timeout=SEND_TIMEOUT_SECONDS)
        except (ChannelError, StalledError) as error:
            raise WorkerLostError(f"{self.name} cannot be reached: {error}") from error

    def expect(self, activity: str) -> None:
        """Let the watchdog count from now until the worker has done `activity`."""
        self.waiting_for = activity
        self.last_message_at = time.monotonic()

    def describe_exit(self) -> str:
        """One clause that says how the process ended."""
        try:
            code = self.process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            return "its control socket is closed although the process still runs"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"killed by {signal.Signals(-code).name}"
            return f"killed by signal {-code}"
        return f"exited with status {code}"


class WorkerPool:
    """All workers of a run, and one inbox for what they say."""

    def __init__(self, log_folder: Path) -> None:
        self.inbox: queue.Queue[tuple[Worker, FromWorker | WorkerLost]] = queue.Queue()
        self._log_folder = log_folder
        self._workers: list[Worker] = []
        self._listeners: list[threading.Thread] = []

    @property
    def workers(self) -> tuple[Worker, ...]:
        return tuple(self._workers)

    def start(
        self, role: str, name: str, *, weight_sockets: Sequence[socket.socket] = ()
    ) -> Worker:
        """Start a worker; `weight_sockets` are inherited by it and closed here."""
        ours, theirs = channel_pair()
        inherited = [theirs.fileno(), *(end.fileno() for end in weight_sockets)]
        self._log_folder.mkdir(parents=True, exist_ok=True)
        log = self._log_folder / f"{name}.log"
        command = [sys.executable, "-m", "integrations.trainer.worker", role]
        command += ["--control-fd", str(inherited[0])]
        for descriptor in inherited[1:]:
            command += ["--weights-fd", str(descriptor)]
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=inherited,
            )
        theirs.close()
        for end in weight_sockets:
            end.close()
        channel = Channel(ours, message_type=FromWorker, max_message_bytes=FRAME_LIMIT_BYTES)
        worker = Worker(name=name, process=process, channel=channel, log=log)
        listener = threading.Thread(
            target=self._listen, args=(worker,), name=f"inbox-{name}", daemon=True
        )
        self._workers.append(worker)
        self._listeners.append(listener)
        listener.start()
        return worker

    def _listen(self, worker: Worker) -> None:
        while True:
            try:
                arrived = worker.channel.receive(LISTEN_SECONDS)
            except StalledError:
                continue
            except ChannelClosedError:
                self.inbox.put((worker, WorkerLost(worker.describe_exit())))
                return
            except (ChannelError, OSError) as error:
                self.inbox.put((worker, WorkerLost(f"unreadable control socket: {error}")))
                return
            worker.last_message_at = time.monotonic()
            for received in arrived:
                self.inbox.put((worker, received.message))

    def check_watchdog(self, limit_seconds: float) -> None:
        """Notice a worker that is alive and silent though something is expected of it.

        Raises:
            WorkerLostError: a worker has been silent for longer than the limit.
        """
        now = time.monotonic()
        for worker in self._workers:
            silence = now - worker.last_message_at
            if worker.waiting_for and silence > limit_seconds:
                raise WorkerLostError(
                    f"{worker.name} made no progress for {silence:.0f} s while "
                    f"{worker.waiting_for} (watchdog.seconds is {limit_seconds:g}); "
                    f"its log: {worker.log}"
                )

    def stop(self, *, grace: float = STOP_GRACE_SECONDS) -> None:
        """Ask every worker to stop, wait, and kill what is left. Never raises for a dead worker."""
        for worker in self._workers:
            if worker.process.poll() is None:
                with contextlib.suppress(ChannelError):
                    worker.channel.queue(Stop())
                    worker.channel.flush()
        deadline = time.monotonic() + grace
        for worker in self._workers:
            try:
                worker.process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            worker.channel.close()

    def kill(self) -> None:
        """End every worker at once."""
        for worker in self._workers:
            if worker.process.poll() is None:
                worker.process.kill()
        for worker in self._workers:
            worker.process.wait()
        # A listener ends at the end of file that its worker's death leaves; its channel goes last.
        for listener in self._listeners:
            listener.join(JOIN_SECONDS)
        for worker in self._workers:
            worker.channel.close()
