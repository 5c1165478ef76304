"""What publisher and subscriber say to each other.

Every message is a tagged, schema-checked msgspec struct: unknown tags, unknown or missing fields
and wrong types are refused before anything is done with them. Weights never travel in a message.
"""

from __future__ import annotations

from typing import Literal

import msgspec

PROTOCOL = 3
"""Raised whenever a message or its meaning changes; peers of two protocols refuse each other."""


class _Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """Settings that all messages share."""


class Hello(_Struct, frozen=True, tag="hello"):
    """Subscriber to publisher, first: who I am and what I hold (``layout`` as canonical JSON)."""

    protocol: int
    subscriber: str
    process: int
    layout: bytes


class Welcome(_Struct, frozen=True, tag="welcome"):
    """Publisher to subscriber: how to reach the slots. Carries one descriptor per slot for shm.

    The fields from ``transport`` on are those of `weightplane.p2p.Offer`.

    ``layout`` is the digest of the publisher's layout, for the subscriber to check in its turn.
    """

    protocol: int
    layout: str
    process: int
    transport: str
    slots: int
    slot_bytes: int
    endpoint: bytes


class Refused(_Struct, frozen=True, tag="refused"):
    """Publisher to subscriber: you cannot join, and why. The channel closes after it."""

    cause: Literal["layout", "protocol"]
    reason: str


class DeltaOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the delta against the version with manifest ``base`` lies: behind the state, in the
    same slot. ``digest`` is xxh3_128 of its bytes.
    """

    base: str
    offset: int
    byte_count: int
    digest: bytes


class Begin(_Struct, frozen=True, tag="begin"):
    """Publisher to subscriber: claim ``claim`` of ``slot`` is being written, and will be announced.

    What is final already can be digested meanwhile. If the write fails, nothing is announced.
    """

    slot: int
    claim: int


class Vacate(_Struct, frozen=True, tag="vacate"):
    """Publisher to subscriber: ``slot`` is needed; make your own copy of what you keep in it."""

    slot: int


class Replaced(_Struct, frozen=True, tag="replaced"):
    """Publisher to subscriber: ``slot`` is other memory from now on. Carries its descriptor."""

    slot: int
    endpoint: bytes


class Announce(_Struct, frozen=True, tag="announce"):
    """Publisher to subscriber: a version can be read from ``slot`` until you answer.

    ``claim`` is what the slot is stamped with, for readers that keep it; 0 if none can.

    ``digests`` holds 16 bytes per tensor, in the order of the layout's tensors; ``manifest`` covers
    them, so that damage to the digests themselves is found too.
    """

    number: int
    base: str | None
    manifest: str
    created: float
    announced_at: float
    slot: int
    claim: int
    digests: bytes
    delta: DeltaOffer | None


class Progress(_Struct, frozen=True, tag="progress"):
    """Subscriber to publisher: still staging; restarts the publisher's watchdog."""

    number: int
    byte_count: int


class Staged(_Struct, frozen=True, tag="staged"):
    """Subscriber to publisher: whole and verified here; I no longer read the slot."""

    number: int
    staged_at: float
    byte_count: int
    copy_seconds: float
    verify_seconds: float


class Aborted(_Struct, frozen=True, tag="aborted"):
    """Subscriber to publisher: not staged, and why; I no longer read the slot."""

    number: int
    reason: str


class Committed(_Struct, frozen=True, tag="committed"):
    """Subscriber to publisher: this version serves now."""

    number: int
    committed_at: float
    pause_seconds: float


class Retired(_Struct, frozen=True, tag="retired"):
    """Subscriber to publisher: I no longer hold this version, and why (also after a rollback)."""

    number: int
    reason: str


class Goodbye(_Struct, frozen=True, tag="goodbye"):
    """Either way: I close on purpose."""

    reason: str


Message = (
    Hello
    | Welcome
    | Refused
    | Begin
    | Vacate
    | Replaced
    | Announce
    | Progress
    | Staged
    | Aborted
    | Committed
    | Retired
    | Goodbye
)
