"""The tensors of one rank of a cluster, in the flat buffer that plans speak of."""

from __future__ import annotations

from collections.abc import Iterable

from weightplane.cluster_layout import ClusterLayout
from weightplane.errors import LayoutError
from weightplane.layout import Layout, Shard, TensorSpec


def local_layout(cluster: ClusterLayout, rank: int, tensors: Iterable[TensorSpec]) -> Layout:
    """Where a rank's own tensors lie in its arena.

    Args:
        cluster: of all ranks.
        rank: number of the rank.
        tensors: name, shape and dtype of every tensor of this rank, as it has them: the names are
            those of the rank's storages.

    Raises:
        LayoutError: the tensors are not the rank's storages; names the first difference.
    """
    specs = {spec.name: spec for spec in tensors}
    storages = cluster.storages(rank)
    who = cluster.ranks[rank]
    if not storages:
        raise LayoutError(f"rank {who!r} has no tensor: leave it out of the layout")
    names = {storage.name for storage in storages}
    for name in sorted(names ^ specs.keys()):
        here = "the tensors given" if name in names else "the layout"
        raise LayoutError(f"rank {who!r}: {here} lack {name!r}")
    shards: list[Shard] = []
    for storage in storages:
        spec = specs[storage.name]
        if spec.byte_count != storage.byte_count:
            raise LayoutError(
                f"rank {who!r}: tensor {spec.name!r} ({spec}) has {spec.byte_count} bytes, "
                f"the layout {storage.byte_count}"
            )
        shards.append(Shard(spec.name, (0,) * len(spec.shape), spec.shape, storage.offset))
    ordered = tuple(sorted(specs.values(), key=lambda spec: spec.name))
    return Layout(ordered, tuple(shards), int(cluster.arena_bytes[rank]))
