"""Getting a slot back from the subscribers that compute with what lies in it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from weightplane.peer import Peer
from weightplane.slots import SlotTable

logger = logging.getLogger("weightplane")

VACATE_POLL_SECONDS = 0.002
"""How often to look whether a slot was given back: the end of a lock notifies nobody."""

_PATIENCE_SECONDS = 5.0


class Vacating:
    """One wait of a publisher for slots that its subscribers keep.

    It asks the subscribers to make the slot with the oldest version their own copy. If nobody who
    could answer is there, or nobody did in time (a process that is stopped, tensors that outlived
    their subscriber), the memory is left to whoever keeps it, and the slot gets fresh memory: what
    an engine computes with is never overwritten.

    Args:
        slots: the publisher's; protected by its condition.
        stall_seconds: the publisher's watchdog; it bounds the patience with a slot.
    """

    def __init__(self, slots: SlotTable, stall_seconds: float) -> None:
        self._slots = slots
        self._patience = min(stall_seconds, _PATIENCE_SECONDS)
        self._asked_at: dict[int, float] = {}

    def ask(self, slot: int, ready: Sequence[Peer]) -> Sequence[Peer]:
        """Ask for a slot, or give up on it; returns the peers that something was queued for.

        Raises:
            ShmSpaceError: a slot is not given back, and there is no room for another.
        """
        now = time.monotonic()
        asked_at = self._asked_at.setdefault(slot, now)
        if ready and asked_at == now:
            for peer in ready:
                peer.vacate(slot)
            return ready
        if ready and now - asked_at < self._patience:
            return ()
        offer = self._slots.replace(slot)
        if offer is None:
            return ()
        del self._asked_at[slot]
        logger.warning(
            "slot %d is kept by a process that does not give it back in %.1f seconds, and is "
            "replaced by fresh memory",
            slot, now - asked_at,
        )  # fmt: skip
        for peer in ready:
            peer.replace_slot(slot, offer)
        return ready
