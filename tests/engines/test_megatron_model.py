"""A real `GPTModel` on one CPU rank: loaded, patched, compared bit for bit, restored, refused."""

# Megatron-Core is installed beside the engine tests only.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import pytest
import torch

import consistency
from consistency import NumericsContract, UnsupportedError, kernels
from integrations.errors import CheckpointError, EngineConfigError
from integrations.trainer.model.attention import VarlenAttention
from integrations.trainer.model.checkpoint import load_checkpoint
from integrations.trainer.model.decoder import Decoder
from integrations.trainer.model.weights import lm_head_weight

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

ROWS, TOKENS = 3, 40


@pytest.fixture(scope="module")
def alone():
    """Megatron-Core on the CPU with one rank."""
    from integrations.megatron.scoring import single_process

    with single_process():
        yield


@pytest.fixture
def load(alone, checkpoint):
    from integrations.megatron.loading import load_model
    from integrations.megatron.model import ModelOptions

    def make(name: str, **options):
        return load_model(checkpoint(name), ModelOptions(**options)).train()

    return make


def token_ids() -> torch.Tensor:
    return torch.randint(0, 512, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))


def forward(model, ids: torch.Tensor, **options) -> torch.Tensor:
    return model(ids, torch.arange(ids.shape[1]).expand(ids.shape), None, **options)


def reference(folder, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities of the ids at their own places by the embedded decoder, and its weights."""
    config, weights = load_checkpoint(folder)
    weights = {name: tensor.requires_grad_() for name, tensor in weights.items()}
    hidden = Decoder(config, NumericsContract()).forward(
        weights,
        ids.flatten(),
        torch.arange(TOKENS).repeat(ROWS),
        VarlenAttention(torch.arange(ROWS + 1, dtype=torch.int32) * TOKENS),
    )
    values, _ = kernels.lm_head_logprob(
        hidden, lm_head_weight(weights), ids.flatten(), temperature=1.0
    )
    return values.view(ids.shape), weights


@pytest.mark.parametrize("name", ["dense", "moe", "llama"])
def test_a_patched_model_has_the_bits_of_the_embedded_decoder(load, checkpoint, name):
    ids, model = token_ids(), load(name)
    expected, _ = reference(checkpoint(name), ids)
    stock = -forward(model, ids, labels=ids)
    assert not torch.equal(stock, expected)
    assert torch.allclose(stock, expected, atol=2.0)  # the same model, drifting
    assert consistency.patch(model) is model
    assert torch.equal(-forward(model, ids, labels=ids), expected)
    logits = forward(model, ids)
    assert logits.dtype == torch.float32
    scored, _ = kernels.token_logprob(logits.flatten(0, 1), ids.flatten(), temperature=1.0)
    assert torch.equal(scored.view(ids.shape), expected)
    consistency.unpatch(model)
    assert torch.equal(-forward(model, ids, labels=ids), stock)


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_gradients_reach_every_parameter(load, name):
    model, ids = load(name), token_ids()
    consistency.patch(model)
    forward(model, ids, labels=ids).sum().backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert bool(torch.isfinite(parameter.grad).all()), parameter_name
    router = [p.grad for n, p in model.named_parameters() if n.endswith("router.weight")]
    assert all(float(grad.abs().max()) > 0 for grad in router)


def test_recomputed_activations_change_no_bit(load):
    ids = token_ids()
    results = []
    for recompute in (False, True):
        model = load("moe", recompute=recompute)
        consistency.patch(model)
        loss = forward(model, ids, labels=ids)
        loss.sum().backward()
        results.append([loss, *(parameter.grad for parameter in model.parameters())])
    for kept, recomputed in zip(*results, strict=True):
        assert torch.equal(kept, recomputed)


@pytest.mark.parametrize("module", ["core_attn", "mlp", "moe"])
def test_recomputing_one_kind_of_module_changes_no_bit(alone, checkpoint, monkeypatch, module):
    from integrations.megatron import model as models
    from integrations.megatron.loading import load_model

    configure = models.transformer_config

    def selective(*arguments):
        config = configure(*arguments)
        config.recompute_granularity, config.recompute_modules = "selective", [module]
        return config

    folder, ids, results = checkpoint("dense" if module == "mlp" else "moe"), token_ids(), []
    for _ in range(2):
        found = load_model(folder).train()
        consistency.patch(found)
        loss = forward(found, ids, labels=ids)
        loss.sum().backward()
        results.append([loss, *(parameter.grad for parameter in found.parameters())])
        monkeypatch.setattr(models, "transformer_config", selective)
    for kept, recomputed in zip(*results, strict=True):
        assert torch.equal(kept, recomputed)


@pytest.mark.parametrize("overlap", [False, True])
def test_wrappers_of_megatron_core_are_patched_through(load, overlap):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    ids, plain = token_ids(), load("moe")
    consistency.patch(plain)
    loss = forward(plain, ids, labels=ids)
    loss.sum().backward()
    inner = load("moe")
    settings = DistributedDataParallelConfig(overlap_grad_reduce=overlap)
    wrapped = DistributedDataParallel(inner.config, settings, Float16Module(inner.config, inner))
    assert consistency.patch(wrapped) is wrapped
    again = forward(wrapped, ids, labels=ids)
    assert torch.equal(again, loss)
    again.sum().backward()
    wrapped.finish_grad_sync()
    for parameter, other in zip(plain.parameters(), inner.parameters(), strict=True):
        assert torch.equal(other.main_grad, parameter.grad)
    consistency.unpatch(wrapped)
    assert "forward" not in vars(inner.output_layer)


def test_packed_sequences_have_the_bits_of_padded_ones(load):
    from integrations.megatron.scoring import score_tokens

    model = load("moe")
    consistency.patch(model)
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, 512, (n,), generator=generator).tolist() for n in (9, 33, 2, 17)]
    padded = score_tokens(model, sequences, record=True)
    packed = score_tokens(model, sequences, packed=True, record=True)
    for left, right in zip(
        padded.logprobs + padded.routes, packed.logprobs + packed.routes, strict=True
    ):
        assert torch.equal(left, right)
    alone = score_tokens(model, sequences[1:2], temperature=0.5)
    together = score_tokens(model, sequences, temperature=0.5)
    assert torch.equal(alone.logprobs[0], together.logprobs[1])


def test_a_mask_that_is_not_causal_is_refused(load):
    model, ids = load("dense"), token_ids()
    consistency.patch(model)
    positions = torch.arange(TOKENS).expand(ids.shape)
    causal = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).triu(1)
    assert torch.equal(model(ids, positions, causal), model(ids, positions, None))
    causal[..., 3, 1] = True
    with pytest.raises(UnsupportedError, match="is not the causal mask of 40 tokens"):
        model(ids, positions, causal)


@pytest.mark.parametrize(
    "field, value",
    [
        ("context_parallel_size", 2),
        ("fp8", "hybrid"),
        ("hidden_dropout", 0.1),
        ("add_bias_linear", True),
        ("gated_linear_unit", False),
        ("layernorm_zero_centered_gamma", True),
        ("fp32_residual_connection", True),
        ("window_size", (64, 0)),
        ("softmax_type", "learnable"),
        ("gradient_accumulation_fusion", True),
        ("cuda_graph_impl", "local"),
        ("moe_grouped_gemm", True),
        ("moe_router_score_function", "sigmoid"),
        ("moe_router_group_topk", 2),
        ("moe_router_enable_expert_bias", True),
        ("moe_router_fusion", True),
        ("moe_expert_capacity_factor", 1.0),
        ("moe_z_loss_coeff", 1e-3),
        ("moe_shared_expert_intermediate_size", 64),
    ],
)
def test_a_setting_without_a_kernel_is_refused_in_one_line(load, field, value):
    model, ids = load("moe"), token_ids()
    before = forward(model, ids)
    original = getattr(model.config, field)
    setattr(model.config, field, value)
    with pytest.raises(UnsupportedError, match=rf"this GPTModel: {field} is ") as caught:
        consistency.patch(model)
    assert "\n" not in str(caught.value)
    setattr(model.config, field, original)
    assert torch.equal(forward(model, ids), before)


def test_other_activations_losses_and_recomputations_are_refused(load):
    from torch.nn import functional

    cases = [
        ({"activation_func": functional.gelu}, "activation_func is gelu"),
        (
            {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2},
            "moe_router_load_balancing_type is 'aux_loss'",
        ),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
            "recompute_modules has moe_act",
        ),
        ({"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}, "tp_invariant is"),
    ]
    for values, message in cases:
        model = load("moe")
        for field, value in values.items():
            setattr(model.config, field, value)
        with pytest.raises(UnsupportedError, match=message):
            consistency.patch(model, contract=NumericsContract())


def test_modules_and_models_without_a_patch_are_refused(load):
    model = load("dense")
    model.decoder.layers[1].mlp.linear_fc2 = torch.nn.Linear(256, 128, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="linear_fc2 is a Linear, which has no kernel"):
        consistency.patch(model)
    model = load("dense")
    model.rotary_pos_emb.inv_freq = model.rotary_pos_emb.inv_freq / 2
    with pytest.raises(UnsupportedError, match="rotary frequencies are not"):
        consistency.patch(model)
    with pytest.raises(UnsupportedError, match=r"parameter .* is torch.float32"):
        consistency.patch(load("dense").float(), contract=NumericsContract())
    with pytest.raises(UnsupportedError, match="patches exist for GPTModel"):
        consistency.patch(load("dense").decoder)
    model = consistency.patch(load("dense"))
    with pytest.raises(UnsupportedError, match="patched already"):
        consistency.patch(model)
    consistency.unpatch(model)
    with pytest.raises(UnsupportedError, match="is not patched"):
        consistency.unpatch(model)


def test_another_version_of_megatron_core_is_refused():
    from integrations.megatron.version import require_version

    require_version("0.16.1")
    for version in ("0.15.3", "0.16.0", "0.17.0"):
        with pytest.raises(EngineConfigError, match=f"Megatron-Core is {version}.*0.16.1"):
            require_version(version)


def test_degrees_that_cannot_be_kept_are_refused_before_a_model_is_built(load, monkeypatch):
    from megatron.core import parallel_state

    for name, size, message in (
        ("context", 2, "context_parallel_size is 2"),
        ("pipeline_model", 2, "layers is 3, not a multiple of the 2 pipeline-parallel ranks"),
        ("tensor_model", 4, "kv_heads is 2, not a multiple of the 4 tensor-parallel ranks"),
        ("expert_model", 3, "experts is 16, not a multiple of the 3 expert-parallel ranks"),
    ):
        with monkeypatch.context() as patched:
            degree = f"get_{name}_parallel_world_size"
            patched.setattr(parallel_state, degree, lambda size=size: size)
            with pytest.raises(EngineConfigError, match=message):
                load("moe")


def test_a_checkpoint_of_another_model_is_refused(load, checkpoint):
    from integrations.megatron.loading import load_weights
    from integrations.trainer.model.config import ModelConfig

    model = load("dense")
    with pytest.raises(CheckpointError, match="is on one side only"):
        load_weights(model, ModelConfig.load(checkpoint("moe")), checkpoint("moe"))
    with pytest.raises(CheckpointError, match="has no place in this model"):
        load_weights(model, ModelConfig.load(checkpoint("dense")), checkpoint("moe"))


def test_the_shims_are_taken_back():
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    from integrations.megatron.cpu import on_cpu

    def names():
        return (
            torch.cuda.current_device,
            torch.cuda.synchronize,
            torch.Tensor.cuda,
            random.CudaRNGStatesTracker.fork,
            random._get_cuda_rng_state,
            "te_general_gemm" in vars(moe_utils),
        )

    # Another test's ranks may be up, so compare before with after, not with the originals.
    before = names()
    with on_cpu(), on_cpu():
        assert torch.cuda.current_device() == torch.device("cpu")
        assert names() != before
    assert names() == before
