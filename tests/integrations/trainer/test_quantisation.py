"""Experts in MXFP4 on both sides of a run: equal bits, small swaps, clear refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch

from consistency import kernels
from consistency.errors import InvalidInputError
from consistency.quant import PackedTensor, QuantSettings, ScaleRule, pack, qdq, unpack
from integrations.errors import CheckpointError, RecipeError
from integrations.trainer.engine import RolloutEngine
from integrations.trainer.learner.optimizer import MasterOptimizer
from integrations.trainer.model import init_random, tensor_shapes
from integrations.trainer.model.weights import dense
from integrations.trainer.quantisation import WeightQuantiser
from integrations.trainer.recipe_sections import QuantisationRecipe
from integrations.trainer.scoring import score_trajectories
from weightplane.layout import Layout


def quantiser(
    config, targets: Literal["experts", "linears"] = "experts", **fields
) -> WeightQuantiser:
    recipe = QuantisationRecipe(scale_rule="rceil", targets=targets, **fields)
    found = WeightQuantiser.of(config, recipe)
    assert found is not None
    return found


@pytest.fixture
def config(moe_model):
    return replace(
        moe_model.config,
        hidden_size=64,
        head_dim=16,
        moe_intermediate_size=32,
        intermediate_size=96,
    )


def optimizer(weights, chosen: WeightQuantiser) -> MasterOptimizer:
    return MasterOptimizer(
        weights,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        gradient_clip=1e9,
        quantiser=chosen,
    )


@pytest.mark.parametrize("targets", ["experts", "linears"])
def test_a_rollout_from_packed_weights_has_the_bits_of_the_learners_qdq(moe_model, config, targets):
    model = replace(moe_model, config=config, _versions={})
    weights = init_random(config, seed=5)
    trainer = optimizer(weights, quantiser(config, targets))
    engine = RolloutEngine(
        config, model.contract, trainer.served_weights, 0, blocks=400, block_size=4
    )
    trajectories = engine.generate(model.requests(110, seed=1))
    compute = {name: weight.detach() for name, weight in weights.items()}
    scores = score_trajectories(model.decoder(), {0: compute}, trajectories)
    ours = torch.cat([score.logprobs for score in scores])
    theirs = torch.tensor([lp for t in trajectories for lp in t.logprobs], dtype=torch.float32)
    assert len(ours) >= 1000
    assert torch.equal(ours, theirs)
    assert sum(score.flips for score in scores) == 0
    # The check can fail: weights that were not quantised give other numbers.
    plain = score_trajectories(model.decoder(), {0: init_random(config, seed=5)}, trajectories)
    assert not torch.equal(torch.cat([score.logprobs for score in plain]), theirs)


def test_compute_weights_are_the_values_of_the_codes_after_every_step(config):
    weights = init_random(config, seed=1)
    chosen = quantiser(config)
    trainer = optimizer(weights, chosen)
    for step in range(3):
        for weight in weights.values():
            grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step))
            weight.main_grad.copy_(grad)  # type: ignore[attr-defined]
        trainer.step(0.01)
        served, masters = trainer.served_weights, trainer.state()["master"]
        for name in weights:
            rounded = masters[name].bfloat16()
            if name in chosen.names:
                packed = served[name]
                assert isinstance(packed, PackedTensor)
                assert torch.equal(packed.codes, pack(rounded, chosen.settings).codes)
                assert torch.equal(weights[name], unpack(packed))
            else:
                assert torch.equal(weights[name], rounded)
    again = init_random(config, seed=9)
    restored = optimizer(again, chosen)
    restored.load_state(trainer.state(), trainer.steps)
    for name in weights:
        assert torch.equal(weights[name], again[name])


def test_the_gradient_of_a_quantised_expert_reaches_its_main_grad(config):
    weights = init_random(config, seed=1)
    chosen = quantiser(config)
    optimizer(weights, chosen)
    gate_up, down = (weights[name] for name in chosen.names[:2])
    x = torch.randn(7, config.hidden_size).bfloat16()
    scores, ids = kernels.route(torch.randn(7, config.experts), 2, normalise=True)
    kernels.moe_experts(x, gate_up, down, scores, ids).float().sum().backward()
    assert gate_up.grad is None
    assert gate_up.main_grad.abs().sum() > 0  # type: ignore[attr-defined]


def test_a_swap_sends_nibbles_and_scales_and_the_engine_reads_them_back(config):
    weights = init_random(config, seed=1)
    chosen = quantiser(config, "linears")
    served = optimizer(weights, chosen).served_weights
    shapes = tensor_shapes(config)
    layout = Layout.whole(chosen.specs(shapes, "bfloat16"))
    wire = WeightQuantiser.to_wire(served)
    layout.check(wire)
    flat = torch.zeros(layout.size, dtype=torch.uint8)
    for name, view in layout.views(flat).items():
        view.view(torch.uint8).copy_(wire[name].view(torch.uint8))
    received = chosen.from_wire(layout.views(flat))
    assert received.keys() == served.keys()
    for name, weight in received.items():
        if isinstance(weight, PackedTensor):
            assert torch.equal(unpack(weight), weights[name])
            assert weight.byte_count <= 0.27 * 2 * weight.shape.numel()
        else:
            assert torch.equal(weight, weights[name])


def test_exclusions_are_exact_and_the_router_embedding_and_head_stay_in_bf16(config):
    names = set(quantiser(config, "linears").names)
    kept = set(tensor_shapes(config)) - names
    assert all(
        "norm" in n or "embed" in n or "lm_head" in n or n.endswith("mlp.gate.weight") for n in kept
    )
    one = "model.layers.0.mlp.experts.down_proj"
    assert set(quantiser(config, exclude=(one,)).names) == set(quantiser(config).names) - {one}


def test_what_cannot_be_quantised_is_refused_by_name(config, dense_model, moe_model):
    with pytest.raises(RecipeError, match=r"'mlp\.experts' is no tensor"):
        quantiser(config, exclude=("mlp.experts",))
    with pytest.raises(RecipeError, match=r"down_proj.*no multiple of 32"):
        quantiser(replace(config, moe_intermediate_size=48))
    with pytest.raises(RecipeError, match="no experts left"):
        quantiser(dense_model.config)
    served = optimizer(init_random(config, seed=1), quantiser(config)).served_weights
    head = pack(
        torch.zeros(config.vocab_size, config.hidden_size),
        QuantSettings(scale_rule=ScaleRule.RCEIL),
    )
    with pytest.raises(CheckpointError, match="is packed"):
        dense({**served, "lm_head.weight": head}, "lm_head.weight")
    chosen = quantiser(config)
    weights = init_random(config, seed=1)
    weights[chosen.names[0]][0, 0, 0] = float("inf")
    with pytest.raises(InvalidInputError, match=r"gate_up_proj\[0, 0, 0\] is inf"):
        optimizer(weights, chosen)


def test_another_rule_or_source_gives_other_weights(config):
    master = torch.randn(64, 64)
    ours = qdq(master, QuantSettings(scale_rule=ScaleRule.RCEIL)).bfloat16()
    for rule, source in ((ScaleRule.EVEN, "bfloat16"), (ScaleRule.RCEIL, "float32")):
        other = QuantSettings(scale_rule=rule, source_dtype=source)
        assert not torch.equal(qdq(master, other).bfloat16(), ours)
