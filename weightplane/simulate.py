"""How long a plan takes on a cluster that exists on paper.

The model: every rank has its share of its host's network cards, full duplex, and a faster link to
the other ranks of its host; each of these ports carries one chunk at a time in each direction, in
the order of the plan's rounds, and a hop begins when both its ports are free and, at a relay, when
the chunk has arrived. A hop keeps its ports for its bytes over their rate, and arrives a fixed
latency later. There is no barrier between rounds. The fabric between the cards is assumed to be
non-blocking.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy
from numpy.typing import NDArray

from weightplane.boxes import Integers
from weightplane.errors import InvalidArgumentError
from weightplane.plan import Plan

__all__ = ["Cluster", "Simulation", "simulate"]

Seconds = NDArray[numpy.float64]


@dataclass(frozen=True, slots=True)
class Cluster:
    """Hosts and links. Trainer and rollout ranks are on different hosts, in the order of the ranks.

    Attributes:
        ranks_per_host: ranks, usually GPUs, of one host.
        nics_per_host: network cards of one host, shared evenly by its ranks.
        nic_bytes_per_second: of one card, in each direction; 50e9 is 400 Gbit/s.
        local_bytes_per_second: between ranks of one host, per rank and direction.
        hop_seconds: latency of one chunk, whatever its size.
    """

    ranks_per_host: int = 8
    nics_per_host: int = 8
    nic_bytes_per_second: float = 50e9
    local_bytes_per_second: float = 400e9
    hop_seconds: float = 20e-6

    def __post_init__(self) -> None:
        for name in ("ranks_per_host", "nics_per_host"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}; use at least 1")
        for name in ("nic_bytes_per_second", "local_bytes_per_second"):
            if not getattr(self, name) > 0:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}; use more than 0")
        if not self.hop_seconds >= 0:
            raise InvalidArgumentError(f"hop_seconds is {self.hop_seconds}; use at least 0")

    @property
    def network_bytes_per_second(self) -> float:
        """A rank's share of the network cards."""
        return self.nic_bytes_per_second * self.nics_per_host / self.ranks_per_host

    def hosts(self, sources: int, destinations: int) -> Integers:
        """int64 [sources + destinations]: the host of every endpoint."""
        trainer = numpy.arange(sources) // self.ranks_per_host
        rollout = numpy.arange(destinations) // self.ranks_per_host
        first = int(trainer[-1]) + 1 if sources else 0
        return numpy.concatenate([trainer, first + rollout])


@dataclass(frozen=True, eq=False)
class Simulation:
    """When every hop of a plan began and ended.

    Attributes:
        plan, cluster: what was simulated.
        begin, end: float64 [hops], seconds.
        local: bool [hops], whether the hop stays inside a host.
    """

    plan: Plan
    cluster: Cluster
    begin: Seconds
    end: Seconds
    local: NDArray[numpy.bool_]

    @property
    def seconds(self) -> float:
        """From the first byte to the last."""
        return float(self.end.max()) if len(self.end) else 0.0

    @cached_property
    def bound_seconds(self) -> float:
        """Bytes of the busiest port over its rate: no order of these hops can be faster.

        For the trainer it also holds whatever the paths: its egress is one copy of the model.
        """
        bound = 0.0
        for chosen, rate in (
            (~self.local, self.cluster.network_bytes_per_second),
            (self.local, self.cluster.local_bytes_per_second),
        ):
            for endpoint in (self.plan.hop_sender, self.plan.hop_receiver):
                totals = numpy.bincount(endpoint[chosen], self.plan.hop_bytes[chosen])
                bound = max(bound, float(totals.max(initial=0.0)) / rate)
        return bound

    @property
    def bandwidth_fraction(self) -> float:
        """The bound over the simulated time; 1 is perfect."""
        return self.bound_seconds / self.seconds if self.seconds else 1.0

    def busy_fraction(self, receivers: bool) -> tuple[Seconds, Seconds]:
        """Times, and the share of the ranks that receive from trainers and from relays then.

        Args:
            receivers: count receiving ranks if true, sending ranks otherwise.

        Returns:
            Bin edges in seconds, float64 [201], and shares, float64 [2, 200]: row 0 of hops from
            trainers, row 1 of hops from relays. A rank that uses both links counts twice.
        """
        edges = numpy.linspace(0.0, max(self.seconds, 1e-12), 201)
        shares = numpy.zeros((2, 200))
        relayed = self.plan.hop_depends_on >= 0
        ranks = len(numpy.unique(self.plan.hop_receiver if receivers else self.plan.hop_sender))
        for row, chosen in enumerate((~relayed, relayed)):
            begun = _cumulative(self.begin[chosen], edges)
            ended = _cumulative(self.end[chosen], edges)
            shares[row] = numpy.diff(begun - ended) / numpy.diff(edges) / max(ranks, 1)
        return edges, shares


def _cumulative(times: Seconds, edges: Seconds) -> Seconds:
    """Integral up to each edge of the number of ``times`` that have passed."""
    ordered = numpy.sort(times)
    sums = numpy.concatenate([[0.0], numpy.cumsum(ordered)])
    passed = numpy.searchsorted(ordered, edges)
    return passed * edges - sums[passed]


def simulate(plan: Plan, cluster: Cluster | None = None) -> Simulation:
    """Play a plan through.

    Args:
        plan: the plan.
        cluster: `Cluster` with its defaults if None.
    """
    cluster = Cluster() if cluster is None else cluster
    hosts = cluster.hosts(plan.source.size, plan.destination.size)
    local = hosts[plan.hop_sender] == hosts[plan.hop_receiver]
    rate = numpy.where(local, cluster.local_bytes_per_second, cluster.network_bytes_per_second)
    lasts = plan.hop_bytes / rate
    sender = plan.hop_sender * 2 + local
    receiver = plan.hop_receiver * 2 + local
    sending, receiving = numpy.zeros(2 * plan.endpoints), numpy.zeros(2 * plan.endpoints)
    begin, end = numpy.zeros(len(lasts)), numpy.zeros(len(lasts))
    order = numpy.argsort(plan.hop_round, kind="stable")
    edges = numpy.searchsorted(plan.hop_round[order], numpy.arange(plan.rounds + 1))
    for first, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        hops = order[first:stop]
        before = plan.hop_depends_on[hops]
        ready = numpy.where(before >= 0, end[before], 0.0)
        start = numpy.maximum(
            numpy.maximum(sending[sender[hops]], receiving[receiver[hops]]), ready
        )
        stopped = start + lasts[hops]
        begin[hops], end[hops] = start, stopped + cluster.hop_seconds
        sending[sender[hops]] = stopped
        receiving[receiver[hops]] = stopped
    return Simulation(plan, cluster, begin, end, local)
