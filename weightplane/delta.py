"""Exact sparse deltas: which 16-bit words of the flat buffer changed since a named base.

A step of reinforcement learning changes about one bf16 weight in a hundred, because most updates
are smaller than half a unit in the last place. A delta is the list of the words that differ, with
their new values: nothing is rounded, so base plus delta has the bits of the full state, whatever
its dtypes: a bf16 weight is one word, an fp32 router weight two, and packed MXFP4 four nibbles (or
two scales) a word.

Layout, little-endian, ``blocks = ceil(words / 65536)``::

    count    uint32 [blocks]   changed words in each block
    offset   uint16 [changed]  of each within its block, growing
    value    uint16 [changed]  the new word

so a change costs four bytes, and a delta is smaller than the state while less than half of the
words change. Publisher and subscriber both check the result by the digests of the full version.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy

from weightplane.errors import DigestMismatchError, InvalidArgumentError

WORD_BYTES = 2
BLOCK_WORDS = 1 << 16


def encode_delta(base: numpy.ndarray, new: numpy.ndarray, target: numpy.ndarray) -> int | None:
    """Write the delta from ``base`` to ``new`` into ``target``.

    Args:
        base: uint8 [size], size a multiple of 8.
        new: uint8 [size].
        target: uint8; where the delta goes, 2-byte aligned.

    Returns:
        Bytes of the delta; None if it does not fit into ``target``.
    """
    if base.shape != new.shape or base.size % 8:
        raise InvalidArgumentError(
            f"a delta needs buffers of one size, a multiple of 8: {base.size} and {new.size} bytes"
        )
    blocks = _block_count(base.size)
    room = (target.size - 4 * blocks) // 4
    if room < 0:
        return None
    counts = numpy.zeros(blocks, numpy.uint32)
    offsets: list[numpy.ndarray] = []
    values: list[numpy.ndarray] = []
    total = 0
    before, after = base.view(numpy.uint16), new.view(numpy.uint16)
    for block in range(blocks):
        # A block fits into the cache, and its offsets into 16 bits.
        words = after[block * BLOCK_WORDS : (block + 1) * BLOCK_WORDS]
        places = numpy.flatnonzero(before[block * BLOCK_WORDS : (block + 1) * BLOCK_WORDS] != words)
        total += len(places)
        if total > room:
            return None
        counts[block] = len(places)
        offsets.append(places.astype(numpy.uint16))
        values.append(words[places])
    target[: 4 * blocks].view(numpy.uint32)[:] = counts
    body = target[4 * blocks : 4 * blocks + 4 * total].view(numpy.uint16)
    numpy.concatenate(offsets, out=body[:total])
    numpy.concatenate(values, out=body[total:])
    return 4 * blocks + 4 * total


def _block_count(size: int) -> int:
    return -(-size // (WORD_BYTES * BLOCK_WORDS))


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """A delta that was read: changed words of a buffer of ``size`` bytes, in order.

    Attributes:
        size: bytes of the buffer.
        positions: int64 [changed], in words.
        values: uint16 [changed].
    """

    size: int
    positions: numpy.ndarray
    values: numpy.ndarray

    @classmethod
    def parse(cls, encoded: numpy.ndarray, size: int) -> Delta:
        """Read what `encode_delta` wrote.

        Raises:
            DigestMismatchError: it is no delta of a buffer of ``size`` bytes.
        """
        blocks = _block_count(size)
        if encoded.size < 4 * blocks:
            raise DigestMismatchError(f"a delta of {encoded.size} bytes for {blocks} blocks")
        counts = encoded[: 4 * blocks].view(numpy.uint32).astype(numpy.int64)
        total = int(counts.sum())
        if encoded.size != 4 * blocks + 4 * total:
            raise DigestMismatchError(
                f"a delta of {encoded.size} bytes with {total} changes in {blocks} blocks"
            )
        body = encoded[4 * blocks :].view(numpy.uint16)
        starts = numpy.repeat(numpy.arange(blocks, dtype=numpy.int64) * BLOCK_WORDS, counts)
        positions = starts + body[:total]
        if total and (positions[-1] >= size // WORD_BYTES or (numpy.diff(positions) <= 0).any()):
            raise DigestMismatchError("the positions of a delta do not grow, or leave the buffer")
        return cls(size, positions, body[total:].copy())

    def apply(self, buffer: numpy.ndarray, start: int, stop: int) -> None:
        """Change the bytes ``[start, stop)`` of ``buffer``, uint8 [size]; both are even."""
        bounds = (start // WORD_BYTES, stop // WORD_BYTES)
        first, last = numpy.searchsorted(self.positions, bounds)
        buffer.view(numpy.uint16)[self.positions[first:last]] = self.values[first:last]
