"""What a subscriber's thread tells the owner."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Connection(enum.StrEnum):
    """Whether new versions can arrive."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    LOST = "lost"
    CLOSED = "closed"


class EventKind(enum.StrEnum):
    """What an owner may want to react to."""

    CONNECTED = "connected"
    OFFERED = "offered"
    STAGED = "staged"
    ABORTED = "aborted"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class SubscriberEvent:
    """Something happened in the staging thread, at `time.monotonic` ``at``.

    ``number`` is the weight version concerned, None if it is about the connection.
    """

    kind: EventKind
    at: float
    number: int | None = None
    reason: str = ""
