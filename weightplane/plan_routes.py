"""Which chunk takes which path, and in which order.

A *chunk* is a list of cells that the same source ranks hold and the same destination ranks need. It
leaves the trainer once, from the least loaded of the ranks that hold it, and the destination ranks
hand it on to one another. Chains of different chunks begin at different ranks, so that all of them
receive and send at the same time; a rank receives every byte once whatever the number of replicas.

A *round* is a set of hops in which every rank sends at most one chunk and receives at most one over
the network, and as much inside its host, so that nobody is the target of two senders (incast).
Rounds are an edge colouring of the multigraph of hops: each hop takes the first round that is free
at both ends and comes after the hop it depends on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from weightplane.boxes import Integers
from weightplane.plan_cells import CellTable

__all__ = ["Hops", "bundle", "choose_sources", "rounds", "route"]


MOST_EXTRA_PARTS = 16
"""Most chunks that a small group is cut into only to share them out."""


@dataclass(frozen=True)
class Hops:
    """Transfers of chunks, one row each; ``depends_on`` is a row, or -1.

    Endpoints number the source ranks first, then the destination ranks.
    """

    chunk: Integers
    sender: Integers
    receiver: Integers
    depends_on: Integers


def bundle(
    cells: CellTable, source_sizes: Integers, destination_sizes: Integers, chunk_bytes: int
) -> tuple[CellTable, Integers]:
    """Sort the cells and cut them into chunks.

    Chunks of one group (equal sources and destinations) are about equally large. Where a chunk has
    a choice of sources or a chain of receivers, its group is cut into at least a few chunks per
    rank, so that the work can be shared out evenly.

    Args:
        cells: in any order.
        source_sizes, destination_sizes: int64 [sets], ranks in each set.
        chunk_bytes: the size to aim at.

    Returns:
        The cells in the order of the wire, and int64 [chunks + 1], the first cell of each chunk.
    """
    order = numpy.lexsort(
        (*reversed(cells.start.T), cells.tensor, cells.destinations, cells.sources)
    )
    cells = cells.take(order)
    if not len(order):
        return cells, numpy.zeros(1, numpy.int64)
    new_group = numpy.ones(len(order), bool)
    new_group[1:] = (numpy.diff(cells.sources) != 0) | (numpy.diff(cells.destinations) != 0)
    first = numpy.flatnonzero(new_group)
    group = numpy.cumsum(new_group) - 1
    total = numpy.add.reduceat(cells.byte_count, first)
    choices = source_sizes[cells.sources[first]]
    shared = numpy.maximum(choices * (choices > 1), destination_sizes[cells.destinations[first]])
    # A quarter of a chunk, because a chain is full only when every rank has one to hand on; and
    # for small models up to one part per rank, but no crumbs.
    few = numpy.minimum(numpy.minimum(shared, MOST_EXTRA_PARTS), total // max(chunk_bytes // 32, 1))
    fine = numpy.maximum(-(-total // max(chunk_bytes // 4, 1)), few)
    parts = numpy.where(shared > 1, fine, 1)
    parts = numpy.maximum(parts, -(-total // chunk_bytes))
    end = numpy.cumsum(cells.byte_count)
    middle = end - cells.byte_count // 2 - (end[first] - cells.byte_count[first])[group]
    # In floating point, because the product of two byte counts does not fit int64; the numbers are
    # far from 2**53 and the operations are exact or correctly rounded, so every machine agrees.
    part = (middle.astype(numpy.float64) * parts[group] / total[group]).astype(numpy.int64)
    new_chunk = new_group.copy()
    new_chunk[1:] |= numpy.diff(part) != 0
    return cells, numpy.append(numpy.flatnonzero(new_chunk), len(order))


def choose_sources(
    byte_count: Integers, sets: Integers, holders: Sequence[tuple[int, ...]], ranks: int
) -> Integers:
    """The source rank of every chunk: where there is a choice, the least loaded.

    Args:
        byte_count, sets: int64 [chunks].
        holders: the ranks of each set.
        ranks: number of source ranks.
    """
    sizes = numpy.array([len(members) for members in holders], numpy.int64)
    firsts = numpy.array([members[0] for members in holders], numpy.int64)
    chosen = firsts[sets]
    free = sizes[sets] > 1
    load = numpy.bincount(chosen[~free], byte_count[~free], minlength=ranks).astype(numpy.int64)
    candidates = [numpy.array(members, numpy.int64) for members in holders]
    open_chunks = numpy.flatnonzero(free)
    # The largest first, then those with the least choice.
    order = open_chunks[numpy.lexsort((sizes[sets[open_chunks]], -byte_count[open_chunks]))]
    for chunk in order.tolist():
        members = candidates[sets[chunk]]
        rank = members[load[members].argmin()]
        load[rank] += byte_count[chunk]
        chosen[chunk] = rank
    return chosen


def route(
    source: Integers, sets: Integers, receivers: Sequence[tuple[int, ...]], first_endpoint: int,
    fan_out: int, ranks_per_host: int,
) -> Hops:  # fmt: skip
    """The hops of every chunk: from its source to one receiver, and on along a tree.

    Args:
        source: int64 [chunks], endpoint that sends first.
        sets: int64 [chunks], number of the set of destination ranks.
        receivers: the destination ranks of each set.
        first_endpoint: endpoint of destination rank 0.
        fan_out: receivers that a receiver hands a chunk on to; 1 is a chain.
        ranks_per_host: destination ranks of one host; a chain visits a host's ranks one after
            another, and enters it at another rank each time.
    """
    sizes = numpy.array([len(members) for members in receivers], numpy.int64)
    hops: list[tuple[Integers, ...]] = []
    base = 0
    for size in numpy.unique(sizes[sets]).tolist():
        chunks = numpy.flatnonzero(sizes[sets] == size)
        members = numpy.zeros((len(sizes), size), numpy.int64)
        per_host = numpy.ones(len(sizes), numpy.int64)
        for number, ranks in enumerate(receivers):
            if len(ranks) == size:
                members[number] = ranks
                per_host[number] = _ranks_together(ranks, ranks_per_host)
        turn = _ordinals(sets[chunks])
        place = _turned(size, turn, per_host[sets[chunks]])
        order = members[sets[chunks][:, None], place] + first_endpoint
        parent = (numpy.arange(size) - 1) // fan_out
        sender = order[:, numpy.maximum(parent, 0)]
        sender[:, 0] = source[chunks]
        rows = base + numpy.arange(len(chunks))[:, None] * size
        depends = numpy.where(numpy.arange(size) == 0, -1, rows + parent)
        hops.append(
            (numpy.repeat(chunks, size), sender.reshape(-1), order.reshape(-1), depends.reshape(-1))
        )
        base += len(chunks) * size
    if not hops:
        none = numpy.zeros(0, numpy.int64)
        return Hops(none, none, none, none)
    return Hops(*(numpy.concatenate([part[column] for part in hops]) for column in range(4)))


def _ranks_together(ranks: tuple[int, ...], ranks_per_host: int) -> int:
    """How many of ``ranks`` each host has that has any; 1 if that differs between hosts."""
    counts = Counter(rank // ranks_per_host for rank in ranks)
    sizes = set(counts.values())
    return sizes.pop() if len(sizes) == 1 else 1


def _turned(size: int, turn: Integers, per_host: Integers) -> Integers:
    """Order of the places 0 to ``size`` for each chunk, int64 [chunks, size].

    The first host moves on by one with every chunk, and after a round of the hosts the first rank
    within each host does.
    """
    hosts = (size // per_host)[:, None]
    own = per_host[:, None]
    host, rank = numpy.divmod(numpy.arange(size)[None, :], own)
    turn = turn[:, None]
    return (host + turn) % hosts * own + (rank + turn // hosts) % own


def _ordinals(values: Integers) -> Integers:
    """For every entry, how many equal entries come before it."""
    order = numpy.argsort(values, kind="stable")
    ranked = values[order]
    first = numpy.searchsorted(ranked, ranked)
    ordinals = numpy.empty(len(values), numpy.int64)
    ordinals[order] = numpy.arange(len(values)) - first
    return ordinals


def rounds(hops: Hops, hosts: Integers) -> Integers:
    """The round of every hop, int64 [hops].

    Long chains go first, because their last receiver waits longest; then the receivers take turns,
    each beginning with another sender.

    Args:
        hops: a hop comes after the one it depends on.
        hosts: int64 [endpoints], the host of each.
    """
    order = _priority(hops)
    local = hosts[hops.sender] == hosts[hops.receiver]
    senders = (hops.sender * 2 + local)[order].tolist()
    receivers = (hops.receiver * 2 + local)[order].tolist()
    depends = hops.depends_on[order].tolist()
    sending, receiving = [0] * (2 * len(hosts)), [0] * (2 * len(hosts))
    assigned = [0] * len(order)
    for hop, sender, receiver, before in zip(
        order.tolist(), senders, receivers, depends, strict=True
    ):
        earliest = assigned[before] + 1 if before >= 0 else 0
        free = ~(sending[sender] | receiving[receiver]) >> earliest
        slot = free & -free
        assigned[hop] = earliest + slot.bit_length() - 1
        slot <<= earliest
        sending[sender] |= slot
        receiving[receiver] |= slot
    return numpy.array(assigned, numpy.int64)


def _priority(hops: Hops) -> Integers:
    """Order in which hops choose their rounds."""
    length = numpy.bincount(hops.chunk)[hops.chunk] if len(hops.chunk) else hops.chunk
    turn = numpy.zeros(len(hops.chunk), numpy.int64)
    single = numpy.flatnonzero(length == 1)
    if len(single):
        pair = numpy.lexsort((hops.chunk[single], hops.sender[single], hops.receiver[single]))
        ranked = single[pair]
        receiver, sender = hops.receiver[ranked], hops.sender[ranked]
        nth = _ordinals(receiver * (int(hops.sender.max()) + 1) + sender)
        # Position of the sender among the senders of its receiver, turned by the receiver's number.
        new = numpy.ones(len(ranked), bool)
        new[1:] = (numpy.diff(receiver) != 0) | (numpy.diff(sender) != 0)
        position = numpy.cumsum(new) - 1
        first = position[numpy.searchsorted(receiver, receiver)]
        count = numpy.bincount(receiver[new])[receiver]
        place = (position - first + _dense(receiver)) % count
        turn[ranked] = nth * (int(count.max()) + 1) + place
    return numpy.lexsort((hops.chunk, turn, -length))


def _dense(values: Integers) -> Integers:
    """Values renumbered from 0 in ascending order without gaps."""
    return numpy.unique(values, return_inverse=True)[1].reshape(-1)
