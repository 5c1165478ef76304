"""Every transport that this machine can run, for one suite over all of them."""

from __future__ import annotations

import os

import pytest

from weightplane import TransportUnavailableError
from weightplane.p2p import Offer
from weightplane.p2p.arena import Arena
from weightplane.p2p.readers import READERS, TRANSPORTS, make_transport

SLOT_BYTES = 3 << 20


class Pair:
    """A transport with readers, all closed in the end."""

    def __init__(self, name, slot_bytes=SLOT_BYTES, slots=2):
        try:
            self.transport = make_transport(name, slot_bytes, slots)
        except TransportUnavailableError as error:
            pytest.skip(str(error))
        self.name = name
        self._readers = []

    def fill(self, slot, data):
        self.transport.buffer(slot)[: len(data)] = data
        self.transport.seal(slot)

    def offer(self):
        offer = self.transport.offer
        descriptors = tuple(os.dup(descriptor) for descriptor in offer.descriptors)
        return Offer(offer.transport, offer.slots, offer.slot_bytes, descriptors, offer.endpoint)

    def reader(self):
        return self.open(self.offer())

    def open(self, offer):
        reader = READERS[self.name](offer)
        arena = Arena(offer.slot_bytes)
        reader.register(arena.bytes)
        self._readers.append(reader)
        return reader, arena.bytes

    def close(self):
        for reader in self._readers:
            reader.close()
        self.transport.close()


@pytest.fixture(params=TRANSPORTS)
def name(request):
    return request.param


@pytest.fixture
def pair(name):
    pair = Pair(name)
    yield pair
    pair.close()


@pytest.fixture
def make_pair(name):
    made = []

    def make(**options):
        made.append(Pair(name, **options))
        return made[-1]

    yield make
    for pair in made:
        pair.close()
