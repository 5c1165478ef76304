"""Rollout routing replay (R3): the learner sends every token to the experts that the engine
used."""

from __future__ import annotations

from consistency.routing_replay.agreement import (
    router_flip_rate,
    routing_confidence,
    token_flip_rate,
)
from consistency.routing_replay.builder import RoutingTraceBuilder
from consistency.routing_replay.expert_ids import expert_dtype
from consistency.routing_replay.recorder import RoutingRecorder
from consistency.routing_replay.replayer import RoutingReplayer
from consistency.routing_replay.segment import ORIGINS, Origin, Segment
from consistency.routing_replay.trace import RoutingTrace, concatenate

__all__ = [
    "ORIGINS",
    "Origin",
    "RoutingRecorder",
    "RoutingReplayer",
    "RoutingTrace",
    "RoutingTraceBuilder",
    "Segment",
    "concatenate",
    "expert_dtype",
    "router_flip_rate",
    "routing_confidence",
    "token_flip_rate",
]
