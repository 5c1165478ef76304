"""How long a plan takes on a cluster that exists on paper.

The model: every rank has its share of its host's network cards, full duplex, and a faster link to
the other ranks of its host. Each of these ports carries one chunk at a time in each direction. A
receiver takes, among the next few hops in the order of the plan's rounds (its window), the first
whose sender has the chunk and a free port; a sender that becomes free serves the receiver that has
waited longest. A hop keeps its ports for its bytes over their rate, and arrives a fixed latency
later. There is no barrier between rounds. The fabric between the cards is assumed not to block.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from dataclasses import dataclass
from functools import cached_property

import numpy
from numpy.typing import NDArray

from weightplane.errors import InvalidArgumentError
from weightplane.plan import Plan, hosts_of

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
        window: hops among which a receiver chooses; 1 is the strict order of the rounds.
    """

    ranks_per_host: int = 8
    nics_per_host: int = 8
    nic_bytes_per_second: float = 50e9
    local_bytes_per_second: float = 400e9
    hop_seconds: float = 20e-6
    window: int = 8

    def __post_init__(self) -> None:
        for name in ("ranks_per_host", "nics_per_host", "window"):
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


@dataclass(frozen=True, eq=False)
class Simulation:
    """When every hop of a plan began and ended.

    Attributes:
        plan, cluster: what was simulated.
        begin, end: float64 [hops], seconds; ports are free ``hop_seconds`` before the end.
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
        """No plan for these layouts on this cluster is faster, whatever its paths and order.

        The greatest of: what a rollout host needs, every byte once, over its cards; what a trainer
        rank alone holds over its share of the cards; one copy of the model over all trainer ranks.
        """
        plan, share = self.plan, self.cluster.network_bytes_per_second
        hosts = hosts_of(plan.source, plan.destination, self.cluster.ranks_per_host)
        hosts = hosts[plan.source.size :]
        into = plan.needed_bytes(hosts - hosts.min()).max(initial=0) / (
            self.cluster.nic_bytes_per_second * self.cluster.nics_per_host
        )
        alone = plan.fixed_egress_bytes.max(initial=0) / share
        return float(max(into, alone, plan.minimum_egress_bytes / (share * plan.source.size)))

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
            ended = _cumulative(self.end[chosen] - self.cluster.hop_seconds, edges)
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
    hosts = hosts_of(plan.source, plan.destination, cluster.ranks_per_host)
    local = hosts[plan.hop_sender] == hosts[plan.hop_receiver]
    rate = numpy.where(local, cluster.local_bytes_per_second, cluster.network_bytes_per_second)
    seconds = plan.hop_bytes / rate
    sender = plan.hop_sender * 2 + local
    receiver = plan.hop_receiver * 2 + local
    order = numpy.lexsort((plan.hop_round, receiver))
    bounds = numpy.searchsorted(receiver[order], numpy.arange(2 * plan.endpoints + 1))
    queues = [
        deque(order[first:stop].tolist())
        for first, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    ]
    begin = _play(
        queues, sender.tolist(), receiver.tolist(), plan.hop_depends_on.tolist(), seconds.tolist(),
        cluster,
    )  # fmt: skip
    end = begin + seconds + cluster.hop_seconds
    return Simulation(plan, cluster, begin, end, local)


def _play(
    queues: list[deque[int]], sender: list[int], receiver: list[int], depends_on: list[int],
    seconds: list[float], cluster: Cluster,
) -> Seconds:  # fmt: skip
    """When every hop begins: events in the order of time, ties in the order they were made."""
    ports = len(queues)
    windows = [
        [queue.popleft() for _ in range(min(cluster.window, len(queue)))] for queue in queues
    ]
    sending, receiving = [False] * ports, [False] * ports
    waiting: list[dict[int, None]] = [{} for _ in range(ports)]
    arrived = [before < 0 for before in depends_on]
    children: dict[int, list[int]] = {}
    for hop, before in enumerate(depends_on):
        if before >= 0:
            children.setdefault(before, []).append(hop)
    begin = numpy.zeros(len(sender))
    # (time, tie, hop, whether the hop left its ports; otherwise it arrived)
    events: list[tuple[float, int, int, bool]] = []
    made = itertools.count()

    def start(port: int, now: float) -> None:
        """Let an idle receiver begin the first hop of its window that can begin."""
        if receiving[port]:
            return
        window = windows[port]
        for place, hop in enumerate(window):
            if not arrived[hop]:
                continue
            if sending[sender[hop]]:
                waiting[sender[hop]][port] = None
                continue
            sending[sender[hop]] = receiving[port] = True
            begin[hop] = now
            del window[place]
            if queues[port]:
                window.append(queues[port].popleft())
            heapq.heappush(events, (now + seconds[hop], next(made), hop, True))
            return

    for port in range(ports):
        start(port, 0.0)
    while events:
        now, _, hop, left = heapq.heappop(events)
        if not left:
            for child in children[hop]:
                arrived[child] = True
                start(receiver[child], now)
            continue
        if hop in children:
            heapq.heappush(events, (now + cluster.hop_seconds, next(made), hop, False))
        port = sender[hop]
        sending[port] = receiving[receiver[hop]] = False
        callers = list(waiting[port])
        for caller in callers:
            if sending[port]:
                break
            del waiting[port][caller]
            start(caller, now)
        start(receiver[hop], now)
    return begin
