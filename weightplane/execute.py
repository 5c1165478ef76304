"""A plan executed in one process, on arenas of bytes: the reference for everything on a wire."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
from numpy.typing import NDArray

from weightplane.errors import InvalidArgumentError
from weightplane.plan import Plan
from weightplane.plan_part import ChunkWork, Region

__all__ = ["Arena", "execute", "pack", "unpack"]

Arena = NDArray[numpy.uint8]


def pack(arena: Arena, work: ChunkWork) -> Arena:
    """The wire bytes of a chunk, uint8 [byte_count], gathered from the arena that holds it."""
    wire = numpy.empty(work.byte_count, numpy.uint8)
    for region in work.regions:
        _on_wire(wire, region)[...] = _in_arena(arena, region)
    return wire


def unpack(arena: Arena, work: ChunkWork, wire: Arena) -> None:
    """Scatter the wire bytes of a chunk into the arena.

    Raises:
        InvalidArgumentError: there are more or fewer bytes than the chunk has.
    """
    if wire.shape != (work.byte_count,):
        raise InvalidArgumentError(
            f"chunk {work.chunk} has {work.byte_count} bytes, {wire.shape} arrived"
        )
    for region in work.regions:
        _in_arena(arena, region)[...] = _on_wire(wire, region)


def execute(plan: Plan, source: Sequence[Arena], destination: Sequence[Arena]) -> None:
    """Do everything that a plan says, round by round.

    Args:
        plan: the plan.
        source, destination: one arena per rank, uint8 [arena_bytes]; the destination's are written.
    """
    arenas = [*source, *destination]
    parts = [plan.part(endpoint) for endpoint in range(plan.endpoints)]
    sends = {work.hop: work for part in parts for work in part.sends}
    arrivals = sorted(
        (work.round, work.hop, part.endpoint, work) for part in parts for work in part.receives
    )
    for part in parts:
        for offset, byte_count in part.fills:
            arenas[part.endpoint][offset : offset + byte_count] = 0
    for _, hop, endpoint, work in arrivals:
        unpack(arenas[endpoint], work, pack(arenas[work.peer], sends[hop]))


def _in_arena(arena: Arena, region: Region) -> Arena:
    """View [*shape, item_bytes] of the arena."""
    return numpy.lib.stride_tricks.as_strided(
        arena[region.offset :],
        (*region.shape, region.item_bytes),
        (*region.strides, 1),
    )


def _on_wire(wire: Arena, region: Region) -> Arena:
    piece = wire[region.wire_offset : region.wire_offset + region.byte_count]
    return piece.reshape(*region.shape, region.item_bytes)
