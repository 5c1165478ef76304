"""``Scheduler``: which requests run in the next step, and on which blocks.

Order of arrival decides everything: who is admitted first, and (from the other end) who loses its
blocks when none is left. The oldest running request can therefore always finish.

Requests that share a prompt are not prefilled side by side: while one of them builds a block, the
others wait for it (``_building``) and then take the block from the prefix cache. The prompt of a
group of samples is computed once, except for its last, partial block.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from enum import Enum

import numpy as np

from integrations.trainer.engine.blocks import BlockPool, block_keys
from integrations.trainer.engine.requests import Place, RequestState, RequestTable

__all__ = ["Scheduler"]


class _Refusal(Enum):
    """Why a waiting request is not admitted now."""

    NO_SPACE = "no space"
    BEING_BUILT = "its prefix is being built"


def _order(state: RequestState) -> int:
    return state.order


class Scheduler:
    """Queues and block ownership; knows nothing of weights, tensors or sampling.

    Args:
        table: per-token arrays of all requests.
        blocks: number of blocks.
        block_size: tokens per block.
        max_running: most requests computed in one step.
        before_drop: called before the KV of a request is given up.
    """

    def __init__(
        self,
        table: RequestTable,
        blocks: int,
        block_size: int,
        max_running: int,
        before_drop: Callable[[RequestState], None],
    ) -> None:
        self.running: list[RequestState] = []
        self.waiting: list[RequestState] = []
        self.paused: list[RequestState] = []
        self.preemptions = 0
        self._table = table
        self._pool = BlockPool(blocks)
        self._block_size = block_size
        self._max_running = max_running
        self._before_drop = before_drop
        self._building: dict[bytes, RequestState] = {}

    @property
    def available_blocks(self) -> int:
        """Blocks that a request could take."""
        return self._pool.available

    def add(self, state: RequestState) -> None:
        """Queue a new request."""
        self._enter(state, Place.WAITING)

    def remove(self, state: RequestState) -> None:
        """Forget a request and free its blocks."""
        self._leave(state)
        self._release(state)

    def pause(self, state: RequestState) -> None:
        """Set a request aside with its KV."""
        self._leave(state)
        self._disown(state)
        self._enter(state, Place.PAUSED)

    def resume(self, state: RequestState) -> None:
        """Queue a paused request; it is admitted without any work if it still has its KV."""
        self._leave(state)
        self._enter(state, Place.WAITING)

    def drop_kv(self, state: RequestState) -> None:
        """Give up the KV of a request; a running one is queued to be computed again."""
        self._before_drop(state)
        state.built = max(state.built, int(self._table.computed[state.row]))
        self._release(state)
        if state.place is Place.RUNNING:
            self._leave(state)
            self._enter(state, Place.WAITING)

    def forget_cached(self) -> None:
        """Empty the prefix cache: new weights have arrived."""
        self._pool.forget_cached()
        self._building.clear()

    def grow(self) -> None:
        """Give every running request the block for its next row, preempting if none is left."""
        rows = self.rows(self.running)
        table = self._table
        lacking = table.length[rows] > table.block_count[rows] * self._block_size
        for state in [self.running[index] for index in np.flatnonzero(lacking)]:
            while state.place is Place.RUNNING and not self._extend(state):
                self._preempt(self._victim(state))

    def admit(self, budget: int) -> int:
        """Start waiting requests while there is room; returns the rows found in the prefix cache.

        Args:
            budget: rows of prefill that the coming step can still take.
        """
        cached = 0
        queue, self.waiting = self.waiting, []
        stop = len(queue)
        for index, state in enumerate(queue):
            if len(self.running) >= self._max_running or budget <= 0:
                stop = index
                break
            found = self._reserve(state)
            # Paused requests keep their KV only as long as nobody else would starve.
            while found is _Refusal.NO_SPACE and not self.running:
                holder = self._last_holder(queue[index + 1 :])
                if holder is None:
                    break
                self._preempt(holder)
                found = self._reserve(state)
            if found is _Refusal.NO_SPACE:
                stop = index
                break
            if found is _Refusal.BEING_BUILT:
                self.waiting.append(state)
                continue
            cached += found
            budget -= int(self._table.length[state.row] - self._table.computed[state.row])
            self._enter(state, Place.RUNNING)
        self.waiting.extend(queue[stop:])
        return cached

    def publish(self, states: list[RequestState]) -> None:
        """Offer the blocks that ``states`` have filled to the prefix cache."""
        for state in states:
            full = int(self._table.computed[state.row]) // self._block_size
            if state.pure:
                keys = self._keys(state)
                for index in range(state.published, full):
                    self._pool.publish(state.blocks[index], keys[index])
                    if self._building.get(keys[index]) is state:
                        del self._building[keys[index]]
            state.published = full

    @staticmethod
    def rows(states: list[RequestState]) -> np.ndarray:
        """Table rows of ``states``, int64."""
        return np.fromiter((state.row for state in states), np.int64, len(states))

    def _reserve(self, state: RequestState) -> int | _Refusal:
        """Blocks for all known tokens, shared ones first; returns the rows found in the cache."""
        table, size = self._table, self._block_size
        if state.blocks:
            whole = table.length[state.row] <= len(state.blocks) * size
            return 0 if whole or self._extend(state) else _Refusal.NO_SPACE
        length = int(table.length[state.row])
        # The last row is computed in any case: its logits are what the request waits for.
        sharable = self._keys(state)[: (length - 1) // size]
        found = self._pool.find(sharable)
        if len(found) < len(sharable) and sharable[len(found)] in self._building:
            return _Refusal.BEING_BUILT
        needed = -(-length // size) - len(found)
        spare = self._pool.available - sum(self._pool.is_idle(block) for block in found)
        # Running requests keep growing; without this margin the newcomer would be preempted.
        margin = len(self.running) // size + 1 if self.running else 0
        if needed + margin > spare:
            return _Refusal.NO_SPACE
        for block in found:
            self._pool.share(block)
        taken = [block for block in (self._pool.take() for _ in range(needed)) if block is not None]
        state.blocks = found + taken
        table.blocks[state.row, : len(state.blocks)] = state.blocks
        table.block_count[state.row] = len(state.blocks)
        table.computed[state.row] = len(found) * size
        state.published = len(found)
        state.note_cached(len(found) * size)
        for key in sharable[len(found) :]:
            self._building.setdefault(key, state)
        return len(found) * size

    def _extend(self, state: RequestState) -> bool:
        """One more block for a request, if there is one."""
        block = self._pool.take()
        if block is None:
            return False
        self._table.blocks[state.row, len(state.blocks)] = block
        state.blocks.append(block)
        self._table.block_count[state.row] += 1
        return True

    def _keys(self, state: RequestState) -> list[bytes]:
        epoch = state.weights.epoch
        known = state.keys if state.keys_epoch == epoch else []
        tokens = self._table.tokens[state.row, : self._table.length[state.row]]
        state.keys = block_keys(epoch, tokens, self._block_size, known)
        state.keys_epoch = epoch
        return state.keys

    def _victim(self, needy: RequestState) -> RequestState:
        """Who gives up its blocks for ``needy``: the latest, paused requests only at the end."""
        if len(self.running) > 1:
            return max(self.running, key=_order)
        return self._last_holder(self.waiting) or needy

    def _last_holder(self, waiting: list[RequestState]) -> RequestState | None:
        """The latest request that holds blocks without running."""
        holders = [state for state in (*self.paused, *waiting) if state.blocks]
        return max(holders, key=_order, default=None)

    def _preempt(self, state: RequestState) -> None:
        self.preemptions += 1
        self.drop_kv(state)

    def _release(self, state: RequestState) -> None:
        self._disown(state)
        self._pool.release(reversed(state.blocks))
        state.blocks = []
        state.pure = True
        state.published = 0
        state.logged = 0
        self._table.computed[state.row] = 0
        self._table.block_count[state.row] = 0

    def _disown(self, state: RequestState) -> None:
        """Nobody waits for the blocks of a request that is not computed any more."""
        if self._building:
            self._building = {k: s for k, s in self._building.items() if s is not state}

    def _enter(self, state: RequestState, place: Place) -> None:
        state.place = place
        if place is Place.RUNNING:
            self.running.append(state)
        elif place is Place.PAUSED:
            self.paused.append(state)
        else:
            bisect.insort(self.waiting, state, key=_order)

    def _leave(self, state: RequestState) -> None:
        places = {
            Place.RUNNING: self.running,
            Place.PAUSED: self.paused,
            Place.WAITING: self.waiting,
        }
        places[state.place].remove(state)
