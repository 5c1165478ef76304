"""``BlockPool``: who uses which block of the paged cache, and which blocks can be shared.

A *full* block whose rows, and all rows before them, were built by one set of weights has a key: a
hash chain over the tokens, rooted in the number of that set of weights. Two requests with the
same key would compute the same bits (rows do not depend on their batch), so they share the block.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

__all__ = ["BlockPool", "block_keys"]


def block_keys(
    epoch: int, tokens: np.ndarray, block_size: int, known: Sequence[bytes] = ()
) -> list[bytes]:
    """Keys of the full blocks of ``tokens``.

    Args:
        epoch: number of the set of weights that builds the rows; two sets never share a number.
        tokens: int64 token ids from position 0.
        block_size: tokens per block.
        known: keys of the first blocks, from an earlier call with the same tokens.
    """
    keys = list(known)
    parent = keys[-1] if keys else epoch.to_bytes(8, "little")
    for start in range(len(keys) * block_size, len(tokens) - block_size + 1, block_size):
        content = np.ascontiguousarray(tokens[start : start + block_size], dtype="<i8").tobytes()
        parent = hashlib.blake2b(parent + content, digest_size=16).digest()
        keys.append(parent)
    return keys


class BlockPool:
    """Reference-counted blocks with a prefix cache.

    A block is *free* (no user, no key), *used* (one user or more), or *idle* (no user, but still
    in the prefix cache). Idle blocks are given out again, least recently used first, when no
    block is free.
    """

    def __init__(self, blocks: int) -> None:
        self._free = list(range(blocks - 1, -1, -1))
        self._users = [0] * blocks
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that can be taken: free and idle ones."""
        return len(self._free) + len(self._idle)

    def is_idle(self, block: int) -> bool:
        """Whether ``block`` is cached without a user."""
        return block in self._idle

    def take(self) -> int | None:
        """A block with one user and undefined content, or None if all blocks are used."""
        if self._free:
            block = self._free.pop()
        elif self._idle:
            block, _ = self._idle.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
        else:
            return None
        self._users[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more user for a cached block."""
        self._idle.pop(block, None)
        self._users[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One user less for each block; pass a sequence's blocks from last to first.

        Later blocks are useless without the earlier ones, so they must be the first to be
        evicted, and what is released first is evicted first.
        """
        for block in blocks:
            self._users[block] -= 1
            if self._users[block]:
                continue
            if block in self._key_of:
                self._idle[block] = None
            else:
                self._free.append(block)

    def publish(self, block: int, key: bytes) -> None:
        """Make the content of a used block findable; a second block with the key stays private."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Cached blocks of the longest prefix of ``keys``."""
        found: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def forget_cached(self) -> None:
        """Empty the prefix cache: idle blocks become free, used ones lose their key."""
        self._block_of.clear()
        self._key_of.clear()
        self._free.extend(self._idle)
        self._idle.clear()
