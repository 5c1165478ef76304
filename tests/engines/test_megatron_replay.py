"""Routing replay through Megatron-Core's `RouterReplay`, and each of its traps."""

# Megatron-Core is installed beside the engine tests only.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import pytest
import torch

import consistency
from consistency import RoutingReplayError, RoutingTraceError, UnsupportedError
from consistency.routing_replay import RoutingTrace
from integrations.megatron.batch import Batch

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

EXPERTS, TOPK, LAYERS = 16, 4, 3
LENGTHS = (12, 7)


@pytest.fixture(scope="module")
def alone():
    from integrations.megatron.scoring import single_process

    with single_process():
        yield


@pytest.fixture(params=["stock", "patched"])
def model(request, alone, checkpoint):
    from integrations.megatron.loading import load_model

    found = load_model(checkpoint("moe")).train()
    if request.param == "patched":
        consistency.patch(found)
    return found


@pytest.fixture
def recomputing(alone, checkpoint):
    from integrations.megatron.loading import load_model
    from integrations.megatron.model import ModelOptions

    return load_model(checkpoint("moe"), ModelOptions(recompute=True)).train()


def sequences(lengths=LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 512, (n,), generator=generator).tolist() for n in lengths]


def trace(tokens: int, seed: int = 0, valid=None, layers=LAYERS) -> RoutingTrace:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, layers, EXPERTS, generator=generator)
    return RoutingTrace.of(
        scores.topk(TOPK, dim=-1).indices,
        layers=range(layers),
        experts=EXPERTS,
        weight_version=0,
        origin="generated",
        valid=valid,
    )


def forward(model, batch: Batch, rows) -> torch.Tensor:
    ids = batch.token_ids(rows)
    positions = torch.arange(batch.width).expand(ids.shape)
    return model(ids, positions, None).float()


def replay(model, batches):
    from integrations.megatron.replay import replay_routes

    return replay_routes(model, batches)


def routers(model):
    from megatron.core.transformer.moe.router import TopKRouter

    return [module for module in model.modules() if isinstance(module, TopKRouter)]


def test_rows_of_a_batch_go_to_the_traced_experts_sequence_major(model):
    batch, rows = Batch(LENGTHS), sequences()
    traces = [trace(n, seed) for seed, n in enumerate(LENGTHS)]
    with replay(model, [(batch, traces)]) as used:
        forward(model, batch, rows)
    for layer, passes in used.items():
        (ids,) = passes
        for index, routed in enumerate(traces):
            expected = routed.expert_ids[:, layer].to(torch.int64)
            assert torch.equal(ids[batch.rows_of(index)], expected)


def test_padding_and_invalid_tokens_take_the_live_router(model):
    from integrations.megatron.replay import record_routes

    batch, rows = Batch(LENGTHS), sequences()
    with record_routes(model) as live:
        expected = forward(model, batch, rows)
    nowhere = [trace(n, valid=torch.zeros(n, dtype=torch.bool)) for n in LENGTHS]
    with replay(model, [(batch, nowhere)]) as used:
        assert torch.equal(forward(model, batch, rows), expected)
    for layer in live:
        assert torch.equal(used[layer][0], live[layer][0])


def test_the_gradient_reaches_the_router_and_nothing_is_left_behind(model):
    batch, rows = Batch(LENGTHS), sequences()
    traces = [trace(n) for n in LENGTHS]
    with replay(model, [(batch, traces)]):
        forward(model, batch, rows).log_softmax(-1)[..., 7].sum().backward()
    for router in routers(model):
        assert float(router.weight.grad.abs().max()) > 0
        state = router.router_replay
        assert state.router_replay_action is None
        assert state.target_topk_idx is None and state.replay_backward_list == []
        assert "get_replay_topk" not in vars(state)


def test_recomputation_sees_the_same_experts_even_where_the_live_router_chose(recomputing):
    batch, rows = Batch(LENGTHS), sequences()
    valid = torch.arange(LENGTHS[0]) % 3 != 0
    traces = [trace(LENGTHS[0], valid=valid), trace(LENGTHS[1])]
    with replay(recomputing, [(batch, traces), (batch, traces)]) as used:
        losses = [forward(recomputing, batch, rows).log_softmax(-1)[..., 7].sum() for _ in range(2)]
        for loss in losses:
            loss.backward()
    assert all(len(passes) == 2 for passes in used.values())


def test_a_forward_only_pass_leaves_no_entry_for_the_next_step(recomputing):
    batch, rows = Batch(LENGTHS), sequences()
    traces = [trace(n) for n in LENGTHS]
    with replay(recomputing, [(batch, traces)]), torch.no_grad():
        forward(recomputing, batch, rows)
    assert all(not router.router_replay.replay_backward_list for router in routers(recomputing))
    with replay(recomputing, [(batch, traces)]):
        forward(recomputing, batch, rows).sum().backward()


def test_a_part_of_the_backward_passes_is_not_enough(recomputing):
    batch, rows = Batch(LENGTHS), sequences()
    traces = [trace(n) for n in LENGTHS]
    with (
        pytest.raises(RoutingReplayError, match=r"recomputed 1 pass.es. and left 1"),
        replay(recomputing, [(batch, traces)] * 2),
    ):
        losses = [forward(recomputing, batch, rows).sum() for _ in range(2)]
        losses[0].backward()


def test_another_batch_than_described_raises(model):
    traces = [trace(n) for n in LENGTHS]
    wider = Batch((13, 7))
    with (
        pytest.raises(RoutingReplayError, match=r"routes \[26, 4\], its batch has \[24, 4\]"),
        replay(model, [(Batch(LENGTHS), traces)]),
    ):
        forward(model, wider, sequences((13, 7)))
    assert forward(model, wider, sequences((13, 7))).isfinite().all()


def test_more_or_fewer_passes_than_batches_raise(model):
    batch, rows = Batch(LENGTHS), sequences()
    traces = [trace(n) for n in LENGTHS]
    with (
        pytest.raises(RoutingReplayError, match="more passes than there are batches"),
        replay(model, [(batch, traces)]),
    ):
        forward(model, batch, rows)
        forward(model, batch, rows)
    with (
        pytest.raises(RoutingReplayError, match=r"was not replayed 1 time"),
        replay(model, [(batch, traces)] * 2),
    ):
        forward(model, batch, rows)


def test_impossible_traces_raise(model):
    batch = Batch(LENGTHS)
    short = [trace(11), trace(7)]
    with pytest.raises(RoutingTraceError, match="too few"), replay(model, [(batch, short)]):
        pass
    deep = [trace(n, layers=4) for n in LENGTHS]
    with (
        pytest.raises(RoutingReplayError, match=r"layers .0, 1, 2."),
        replay(model, [(batch, deep)]),
    ):
        pass
    twice = torch.zeros(12, LAYERS, TOPK, dtype=torch.int64)
    with pytest.raises(RoutingTraceError, match="repeat an expert"):
        RoutingTrace.of(
            twice, layers=range(LAYERS), experts=EXPERTS, weight_version=0, origin="generated"
        )
    with pytest.raises(RoutingTraceError, match="-1"):
        RoutingTrace.of(
            twice - 1, layers=range(LAYERS), experts=EXPERTS, weight_version=0, origin="generated"
        )


def test_two_blocks_at_once_raise(model):
    from integrations.megatron.replay import record_routes

    with (
        record_routes(model),
        pytest.raises(RoutingReplayError, match="record or replay already"),
        record_routes(model),
    ):
        pass


def test_models_that_would_ignore_a_replay_are_refused(alone, checkpoint):
    from integrations.megatron.loading import load_model
    from integrations.megatron.model import ModelOptions
    from integrations.megatron.replay import record_routes

    def refuse(model, message: str) -> None:
        with pytest.raises(UnsupportedError, match=message), record_routes(model):
            pass

    refuse(load_model(checkpoint("dense")), "dense: it has no routes")
    silent = load_model(checkpoint("moe"), ModelOptions(routing_replay=False))
    refuse(silent, "moe_enable_routing_replay is False")
    for field, value in (("moe_router_fusion", True), ("moe_router_group_topk", 2)):
        model = load_model(checkpoint("moe"))
        setattr(model.config, field, value)
        refuse(model, f"{field} is {value}")


def test_routers_of_other_models_in_the_process_are_left_alone(model, checkpoint):
    from integrations.megatron.loading import load_model
    from integrations.megatron.replay import record_routes

    other = load_model(checkpoint("moe"))
    batch, rows = Batch(LENGTHS), sequences()
    with record_routes(model) as found:
        forward(other, batch, rows)
        assert not any(found.values())
        forward(model, batch, rows)
    assert all(len(passes) == 1 for passes in found.values())
