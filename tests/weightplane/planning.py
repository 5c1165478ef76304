"""Models, random layouts and arenas for the tests of planning."""

from __future__ import annotations

import random

import numpy

from weightplane.cluster_layout import ClusterLayout, RankLayout, Slice, Storage
from weightplane.dtypes import elements_per_byte, item_bytes
from weightplane.layout import ALIGNMENT, TensorSpec
from weightplane.plan import hosts_of


def aligned(offset):
    return -(-offset // ALIGNMENT) * ALIGNMENT


def random_values(layout, seed):
    """For every tensor its items as uint8 [*item shape, item bytes]."""
    generator = numpy.random.default_rng(seed)
    values = {}
    for spec in layout.tensors:
        shape = list(spec.shape)
        if elements_per_byte(spec.dtype) > 1:
            shape[-1] //= 2
        size = (*shape, item_bytes(spec.dtype))
        values[spec.name] = generator.integers(0, 256, size, dtype=numpy.uint8)
    return values


def box_of(values, spec, piece):
    """The items of a slice, cut out of the whole tensor."""
    share = elements_per_byte(spec.dtype)
    cuts = []
    for number, (start, extent, step) in enumerate(
        zip(piece.start, piece.shape, piece.step, strict=True)
    ):
        if share > 1 and number == len(piece.start) - 1:
            start, extent = start // 2, extent // 2
        cuts.append(slice(start, start + (extent - 1) * step + 1, step))
    return values[piece.tensor][tuple(cuts)]


def place_of(arena, layout, rank, piece, shape):
    """The view of an arena in which a slice lies."""
    offset = {storage.name: storage.offset for storage in layout.storages(rank)}[piece.storage]
    return numpy.lib.stride_tricks.as_strided(
        arena[offset + piece.offset :], shape, (*piece.strides, 1)
    )


def filled_arenas(layout, values):
    """Arenas in which every slice holds its values; all else is 0xEE."""
    specs = {spec.name: spec for spec in layout.tensors}
    arenas = []
    for rank in range(layout.size):
        arena = numpy.full(int(layout.arena_bytes[rank]), 0xEE, numpy.uint8)
        for piece in layout.slices(rank):
            box = box_of(values, specs[piece.tensor], piece)
            place_of(arena, layout, rank, piece, box.shape)[...] = box
        arenas.append(arena)
    return arenas


def empty_arenas(layout):
    return [numpy.full(int(size), 0xAA, numpy.uint8) for size in layout.arena_bytes]


def assert_holds(layout, arenas, values):
    """Every slice of every rank equals the values; every byte of padding is zero."""
    specs = {spec.name: spec for spec in layout.tensors}
    for rank, arena in enumerate(arenas):
        rest = arena.copy()
        for piece in layout.slices(rank):
            box = box_of(values, specs[piece.tensor], piece)
            held = place_of(arena, layout, rank, piece, box.shape)
            assert numpy.array_equal(held, box), layout.ranks[rank] + " " + str(piece)
            place_of(rest, layout, rank, piece, box.shape)[...] = 0
        for storage in layout.storages(rank):
            assert not rest[storage.offset : storage.offset + storage.byte_count].any()


def needed_bytes(layout):
    """(bytes that all ranks need, every byte of a rank once; bytes needed by anybody, once)."""
    specs = {spec.name: spec for spec in layout.tensors}
    ids, first = {}, 0
    sizes = {}
    for spec in layout.tensors:
        shape = list(spec.shape)
        if elements_per_byte(spec.dtype) > 1:
            shape[-1] //= 2
        count = int(numpy.prod(shape, dtype=int))
        ids[spec.name] = numpy.arange(first, first + count).reshape(*shape, 1)
        sizes.update(dict.fromkeys(range(first, first + count), item_bytes(spec.dtype)))
        first += count
    everything, total = set(), 0
    for rank in range(layout.size):
        own = set()
        for piece in layout.slices(rank):
            own.update(box_of(ids, specs[piece.tensor], piece).reshape(-1).tolist())
        total += sum(sizes[item] for item in own)
        everything |= own
    return total, sum(sizes[item] for item in everything)


def assert_well_ordered(plan):
    """Nobody sends or receives two chunks in a round over one link, or hands on what it lacks."""
    hosts = hosts_of(plan.source, plan.destination, plan.settings.ranks_per_host)
    local = (hosts[plan.hop_sender] == hosts[plan.hop_receiver]).tolist()
    for side in (plan.hop_sender, plan.hop_receiver):
        triples = list(zip(side.tolist(), plan.hop_round.tolist(), local, strict=True))
        assert len(set(triples)) == len(triples)
    for hop, before in enumerate(plan.hop_depends_on.tolist()):
        sender = int(plan.hop_sender[hop])
        if before < 0:
            assert sender in plan.source_holders(int(plan.hop_chunk[hop]))
        else:
            assert int(plan.hop_receiver[before]) == sender
            assert plan.hop_chunk[before] == plan.hop_chunk[hop]
            assert plan.hop_round[before] < plan.hop_round[hop]


def random_boxes(draw, shape, steps):
    """Disjoint boxes (start, shape, step) that cover a tensor."""
    boxes = [((0,) * len(shape), tuple(shape), (1,) * len(shape))]
    for _ in range(draw.randint(0, 3)):
        start, extent, step = boxes.pop(draw.randrange(len(boxes)))
        wide = [d for d in range(len(extent)) if extent[d] > 1]
        if not wide:
            boxes.append((start, extent, step))
            continue
        d = draw.choice(wide)
        if steps and draw.random() < 0.4:
            ways = draw.randint(2, min(3, extent[d]))
            for way in range(ways):
                first, count = list(start), list(extent)
                by = list(step)
                first[d] += way * step[d]
                count[d] = -(-(extent[d] - way) // ways)
                by[d] *= ways
                boxes.append((tuple(first), tuple(count), tuple(by)))
        else:
            cut = draw.randint(1, extent[d] - 1)
            low, high, first = list(extent), list(extent), list(start)
            low[d], high[d] = cut, extent[d] - cut
            first[d] += cut * step[d]
            boxes.append((start, tuple(low), step))
            boxes.append((tuple(first), tuple(high), step))
    return boxes


def random_layout(draw, specs, name, size, whole):
    """Random slices of ``specs`` over ``size`` ranks; if ``whole``, they cover every tensor."""
    held = [[] for _ in range(size)]
    for spec in specs:
        packed = elements_per_byte(spec.dtype) > 1
        shape = (*spec.shape[:-1], spec.shape[-1] // 2) if packed else spec.shape
        for covering in range(draw.randint(1, 2)):
            ranks = draw.sample(range(size), draw.randint(1, size))
            boxes = random_boxes(draw, shape, steps=not packed)
            if covering or not whole:
                boxes = [box for box in boxes if draw.random() < 0.7]
            for box in boxes:
                owners = draw.sample(ranks, draw.randint(1, min(2, len(ranks))))
                for owner in owners:
                    held[owner].append((spec, box))
    if not any(held):
        shape = specs[0].shape
        if elements_per_byte(specs[0].dtype) > 1:
            shape = (*shape[:-1], shape[-1] // 2)
        held[0].append((specs[0], random_boxes(draw, shape, steps=False)[0]))
    names = {spec.name for rank in held for spec, box in rank if 0 not in box[1]}
    tensors = [spec for spec in specs if spec.name in names or 0 in spec.shape]
    ranks = [
        RankLayout(f"{name}/{rank}", *_placed(draw, pieces)) for rank, pieces in enumerate(held)
    ]
    return ClusterLayout.build(tensors or specs[:1], ranks)


def _placed(draw, pieces):
    """Storages and slices: permuted, spread, padded, two boxes interleaved in one storage."""
    storages, slices, end = [], [], 0
    for number, (spec, (start, shape, step)) in enumerate(pieces):
        packed = elements_per_byte(spec.dtype) > 1
        order = list(range(len(shape)))
        draw.shuffle(order)
        if packed:
            order = list(range(len(shape)))
        gap = draw.choice([1, 1, 2]) if not packed else 1
        strides, jump = [0] * len(shape), item_bytes(spec.dtype) * gap
        for d in reversed(order):
            strides[d] = jump
            jump *= shape[d]
        size = jump
        full = int(numpy.prod(shape, dtype=int)) * item_bytes(spec.dtype)
        padding = size - full + draw.choice([0, 0, 4])
        offset = aligned(end)
        storages.append(Storage(f"storage{number}", offset, full + padding, padding))
        end = offset + full + padding
        if packed:
            start = (*start[:-1], start[-1] * 2)
            shape = (*shape[:-1], shape[-1] * 2)
        slices.append(Slice(spec.name, start, shape, f"storage{number}", 0, tuple(strides), step))
    return tuple(storages), tuple(slices)


def random_sides(seed):
    """A random source that covers every tensor, and a random destination."""
    draw = random.Random(seed)
    specs = []
    for number in range(draw.randint(1, 4)):
        dtype = draw.choice(["bfloat16", "float32", "uint8", "float4_e2m1fn", "float8_e8m0fnu"])
        shape = tuple(draw.randint(1, 6) for _ in range(draw.randint(0, 3)))
        if dtype == "float4_e2m1fn":
            shape = (*shape, 2 * draw.randint(1, 4))
        specs.append(TensorSpec(f"t{number}", shape, dtype))
    source = random_layout(draw, specs, "trainer", draw.randint(1, 4), whole=True)
    destination = random_layout(draw, specs, "rollout", draw.randint(1, 5), whole=False)
    return source, destination
