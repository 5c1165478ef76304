"""Records and replays routes through Megatron-Core's own `RouterReplay`, guarded.

`RouterReplay` alone accepts targets of another batch, keeps entries of forward-only passes for a
later backward, knows no token without a route, lists the routers of every model ever built in the
process, and is told by hand whether a pass recomputes activations. Inside these blocks each router
has a guard that hands it the rows of its own layer, rank and micro-batch, and checks them.
"""

# Megatron-Core is installed beside the engine tests only.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel.random import is_checkpointing
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from consistency.errors import RoutingReplayError, UnsupportedError
from consistency.routing_replay import RoutingReplayer, RoutingTrace, concatenate
from integrations.megatron.batch import Batch
from integrations.megatron.compatibility import core_model, moe_layers

__all__ = ["record_routes", "replay_routes"]

_ReplayTopk = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@contextmanager
def record_routes(model: Any) -> Iterator[Mapping[int, list[torch.Tensor]]]:
    """The expert ids of every pass inside the block, by decoder layer.

    Args:
        model: a `GPTModel` with ``moe_enable_routing_replay``, patched or not.

    Yields:
        For each MoE layer of this rank, one int64 ``[rows, topk]`` per pass; the rows are those
        that the layer's router saw here (see `Batch.share`). Recomputed passes are not counted.

    Raises:
        UnsupportedError: a model without routers, or whose routers cannot record.
    """
    routers = _routers(model)
    found: dict[int, list[torch.Tensor]] = {layer: [] for layer in routers}

    def guard(layer: int, replay: RouterReplay) -> _ReplayTopk:
        def record(scores: torch.Tensor, topk: int, *options: Any, **named: Any) -> Any:
            replay.set_router_replay_action(RouterReplayAction.RECORD)
            values, ids = RouterReplay.get_replay_topk(replay, scores, topk, *options, **named)
            if not _recomputes():
                found[layer].append(ids.detach().clone())
            return values, ids

        return record

    with _guarded(routers, guard):
        yield found


@contextmanager
def replay_routes(
    model: Any, batches: Sequence[tuple[Batch, Sequence[RoutingTrace]]]
) -> Iterator[Mapping[int, list[torch.Tensor]]]:
    """Sends the tokens of the passes inside the block to the traced experts.

    The block holds the forward pass of each micro-batch, in order, and their backward passes if
    there are any. Padding, and tokens that a trace marks invalid, take the live router; their
    recomputation sees the same experts. Megatron-Core gathers scores from the whole router output,
    so that gradients reach the router.

    Args:
        model: a `GPTModel` with ``moe_enable_routing_replay``, patched or not.
        batches: for each micro-batch, how its sequences lie, and the trace of each.

    Yields:
        The experts that each pass used, as `record_routes` has them.

    Raises:
        UnsupportedError: a model without routers, or whose routers cannot replay.
        RoutingTraceError: traces of another model, or with too few or too many tokens.
        RoutingReplayError: a pass with other rows than its batch, more or fewer passes than
            batches, or a part of the recomputations left out.
    """
    inner, routers = core_model(model), _routers(model)
    queues = _targets(inner, batches)
    guards: dict[int, _Replay] = {}

    def guard(layer: int, replay: RouterReplay) -> _ReplayTopk:
        guards[layer] = _Replay(layer, replay, deque(queues[layer]))
        return guards[layer]

    with _guarded(routers, guard):
        yield {layer: replay.used for layer, replay in guards.items()}
        for replay in guards.values():
            replay.finish()


class _Replay:
    """The guard of one router.

    Attributes:
        used: expert ids of each pass that was not a recomputation.
    """

    def __init__(
        self, layer: int, replay: RouterReplay, targets: deque[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        self._layer, self._replay, self._targets = layer, replay, targets
        self._recomputed = 0
        self.used: list[torch.Tensor] = []

    def __call__(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        again = _recomputes()
        if again:
            self._expect_recomputation(scores)
            action = RouterReplayAction.REPLAY_BACKWARD
        else:
            self._take(scores, topk, default_compute_topk)
            action = RouterReplayAction.REPLAY_FORWARD
        self._replay.set_router_replay_action(action)
        values, ids = RouterReplay.get_replay_topk(
            self._replay, scores, topk, num_groups, group_topk, default_compute_topk
        )
        if not again:
            self.used.append(ids.detach().clone())
        return values, ids

    def _take(self, scores: torch.Tensor, topk: int, live: Any) -> None:
        """Hands the next micro-batch's targets to the router."""
        if not self._targets:
            raise RoutingReplayError(
                f"layer {self._layer} runs more passes than there are batches: give replay_routes "
                "one batch per micro-batch"
            )
        targets, valid = self._targets.popleft()
        if targets.shape != (scores.shape[0], topk):
            raise RoutingReplayError(
                f"layer {self._layer} routes {[scores.shape[0], topk]}, its batch has "
                f"{list(targets.shape)} [rows, topk] on this rank: describe the batch of this pass"
            )
        if not bool(valid.all()):
            _, ids = live(scores.detach(), topk, num_groups=None, group_topk=None)
            targets = torch.where(valid[:, None], targets, ids)
        self._replay.set_target_indices(targets)
        if not is_checkpointing():
            # Nothing will recompute this pass: an entry left here would be replayed by a later one.
            self._replay.replay_backward_list.pop()

    def _expect_recomputation(self, scores: torch.Tensor) -> None:
        waiting = self._replay.replay_backward_list
        if not waiting or waiting[0].shape[0] != scores.shape[0]:
            have = f"{waiting[0].shape[0]} rows" if waiting else "no pass"
            raise RoutingReplayError(
                f"layer {self._layer} recomputes {scores.shape[0]} rows, but {have} is waiting for "
                "it: run the backward passes in the order of the forward passes, inside the block"
            )
        self._recomputed += 1

    def finish(self) -> None:
        """Raises unless every pass was replayed, and recomputed if any was."""
        if self._targets:
            raise RoutingReplayError(
                f"layer {self._layer} was not replayed {len(self._targets)} time(s): the block "
                "must hold the forward pass of every batch"
            )
        waiting = len(self._replay.replay_backward_list)
        if self._recomputed and waiting:
            raise RoutingReplayError(
                f"layer {self._layer} recomputed {self._recomputed} pass(es) and left {waiting}: "
                "the block must hold the backward pass of every batch, or of none"
            )


def _recomputes() -> bool:
    """Whether this pass repeats one whose activations were thrown away.

    Megatron-Core runs the first pass of a checkpointed region without gradients, the second with.
    """
    return is_checkpointing() and torch.is_grad_enabled()


def _routers(model: Any) -> dict[int, RouterReplay]:
    """`RouterReplay` of each MoE layer of this rank, by decoder layer."""
    inner = core_model(model)
    routers = [module for module in inner.modules() if isinstance(module, TopKRouter)]
    config = inner.config
    if not config.num_moe_experts:
        raise UnsupportedError("model is dense: it has no routes")
    if not config.moe_enable_routing_replay:
        raise UnsupportedError(
            "moe_enable_routing_replay is False: the routers of this model keep no routes; build "
            "it with True"
        )
    for name in ("moe_router_fusion", "moe_router_group_topk"):
        if getattr(config, name):
            raise UnsupportedError(
                f"{name} is {getattr(config, name)!r}: fused routers ignore a replay, and replayed "
                "experts could leave their groups; turn it off"
            )
    if config.moe_router_load_balancing_type == "sinkhorn":
        raise UnsupportedError(
            "moe_router_load_balancing_type is 'sinkhorn', which replays nothing"
        )
    for router in routers:
        if "get_replay_topk" in vars(router.router_replay):
            raise RoutingReplayError(
                "the routers record or replay already: leave that block before another begins"
            )
    return {router.layer_number - 1: router.router_replay for router in routers}


@contextmanager
def _guarded(
    routers: Mapping[int, RouterReplay], guard: Callable[[int, RouterReplay], _ReplayTopk]
) -> Iterator[None]:
    """Each router with its guard, and an action so that the router asks it."""
    for layer, replay in routers.items():
        replay.clear_indices()
        replay.get_replay_topk = guard(layer, replay)
        replay.set_router_replay_action(RouterReplayAction.RECORD)
    try:
        yield
    finally:
        for replay in routers.values():
            del replay.get_replay_topk
            replay.clear_indices()
            replay.clear_router_replay_action()


def _targets(
    model: Any, batches: Sequence[tuple[Batch, Sequence[RoutingTrace]]]
) -> dict[int, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Per layer and micro-batch: ids int64 ``[rows, topk]`` and bool ``[rows]`` of this rank."""
    config = model.config
    layers = moe_layers(config)
    queues: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {layer: [] for layer in layers}
    for batch, traces in batches:
        RoutingReplayer.of(traces, batch.lengths)  # a trace for each sequence, of its length
        whole = concatenate(traces)
        found = (whole.layers, whole.experts, whole.topk)
        wanted = (layers, config.num_moe_experts, config.moe_router_topk)
        for name, here, there in zip(("layers", "experts", "topk"), wanted, found, strict=True):
            if here != there:
                raise RoutingReplayError(
                    f"the model has {name} {here}, the traces have {there}: they are of another "
                    "model"
                )
        rows = torch.cat([batch.rows_of(index) for index in range(len(batch.lengths))])
        ids = torch.zeros(batch.rows, len(layers), whole.topk, dtype=torch.int32)
        valid = torch.zeros(batch.rows, dtype=torch.bool)
        ids[rows], valid[rows] = whole.expert_ids.to(torch.int32), whole.valid
        if config.sequence_parallel:
            group = model.pg_collection.tp
            share = batch.share(group.rank(), group.size())
            ids, valid = ids[share], valid[share]
        for index, layer in enumerate(layers):
            queues[layer].append((ids[:, index].to(torch.int64), valid))
    return queues
