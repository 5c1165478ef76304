"""New weights reach every engine, whole, once, and fast.

The learner owns a `Publisher`, every rollout engine a `Subscriber`; a connected Unix socket,
inherited by one of them, carries the messages, and shared memory the weights. See
`weightplane.publisher` and `weightplane.subscriber`.
"""

from __future__ import annotations

from weightplane.channel import Channel, channel_pair
from weightplane.cluster_layout import ClusterLayout, RankLayout, Slice, Storage
from weightplane.digest import Manifest, tensor_digest
from weightplane.errors import (
    ChannelClosedError,
    ChannelError,
    ClosedError,
    CommitRefusedError,
    DigestMismatchError,
    InvalidArgumentError,
    LayoutError,
    LayoutMismatchError,
    PlanError,
    PublisherGoneError,
    RecordingError,
    ShmSpaceError,
    StagingMemoryError,
    StalledError,
    TransferError,
    TransportUnavailableError,
    VersionError,
    WeightPlaneError,
)
from weightplane.events import Connection, EventKind, SubscriberEvent
from weightplane.layout import Layout, Shard, TensorSpec
from weightplane.plan import Plan, PlanSettings
from weightplane.publisher import Publisher
from weightplane.relay import Relay
from weightplane.reports import Delivery, PeerState, PeerStatus, Publication
from weightplane.sharded import ShardedPublisher, ShardedSubscriber
from weightplane.subscriber import Subscriber, SubscriberStatus
from weightplane.swap import Swap
from weightplane.version import (
    Transfer,
    VersionLedger,
    VersionRecord,
    VersionState,
    WeightVersion,
)
from weightplane.wire import Connection as WireConnection
from weightplane.wire import Gateway, connect
from weightplane.wire_settings import Address, WireSettings

__all__ = [
    "Publisher",
    "Publication",
    "Delivery",
    "PeerStatus",
    "PeerState",
    "Subscriber",
    "SubscriberStatus",
    "SubscriberEvent",
    "EventKind",
    "Connection",
    "Relay",
    "ShardedPublisher",
    "ShardedSubscriber",
    "Swap",
    "Channel",
    "channel_pair",
    "Gateway",
    "WireConnection",
    "connect",
    "Address",
    "WireSettings",
    "Layout",
    "TensorSpec",
    "Shard",
    "ClusterLayout",
    "RankLayout",
    "Storage",
    "Slice",
    "Plan",
    "PlanSettings",
    "WeightVersion",
    "VersionState",
    "VersionRecord",
    "VersionLedger",
    "Transfer",
    "Manifest",
    "tensor_digest",
    "WeightPlaneError",
    "InvalidArgumentError",
    "LayoutError",
    "LayoutMismatchError",
    "PlanError",
    "RecordingError",
    "VersionError",
    "DigestMismatchError",
    "CommitRefusedError",
    "ChannelError",
    "ChannelClosedError",
    "PublisherGoneError",
    "ShmSpaceError",
    "StagingMemoryError",
    "StalledError",
    "TransferError",
    "TransportUnavailableError",
    "ClosedError",
]
