"""The model definition against transformers, and against itself with and without gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from consistency import kernels
from consistency.contract import NumericsContract
from consistency.errors import RoutingReplayError
from consistency.routing_replay import RoutingRecorder, RoutingReplayer
from integrations.errors import ModelConfigError
from integrations.trainer.model import (
    Decoder,
    KeyValueCache,
    ModelConfig,
    PagedAttention,
    VarlenAttention,
    init_random,
    lm_head_weight,
    load_checkpoint,
    save_checkpoint,
)

TOKENS = 23


def logits_of(config: ModelConfig, weights, tokens, dtype="float32"):
    decoder = Decoder(config, NumericsContract(compute_dtype=dtype))
    starts = torch.tensor([0, len(tokens)], dtype=torch.int32)
    hidden = decoder.forward(weights, tokens, torch.arange(len(tokens)), VarlenAttention(starts))
    return kernels.lm_head_logits(hidden, lm_head_weight(weights))


def tokens_for(config: ModelConfig, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        config.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(seed)
    )


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


def hf_model(transformers, kind: str):
    common = {
        "vocab_size": 99,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "initializer_range": 0.15,
        "max_position_embeddings": 128,
        "attn_implementation": "eager",
    }
    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(
            **common,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        )
        return transformers.LlamaForCausalLM(config)
    if kind == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**common))
    config = transformers.Qwen3MoeConfig(
        **common,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=kind == "qwen3_moe",
        mlp_only_layers=[1],
    )
    return transformers.Qwen3MoeForCausalLM(config)


KINDS = ["llama", "qwen3", "qwen3_moe", "qwen3_moe_unnormalised"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_transformers_checkpoint_gives_the_logits_of_transformers(transformers, kind, tmp_path):
    model = hf_model(transformers, kind).eval()
    # Norm weights of one would hide a norm that is not applied.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(tmp_path)
    config, weights = load_checkpoint(tmp_path, torch.float32)
    tokens = tokens_for(config)
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]
    assert expected.std() > 0.3
    torch.testing.assert_close(logits_of(config, weights, tokens), expected, rtol=0, atol=2e-5)

    low = model.to(torch.bfloat16)
    config, weights = load_checkpoint(tmp_path)
    with torch.no_grad():
        rounded = low(tokens[None]).logits[0].float()
    ours = logits_of(config, weights, tokens, "bfloat16")
    # In bf16 both round; ours must be no further from the exact logits than theirs.
    assert (ours - expected).std() < 1.2 * (rounded - expected).std() + 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_our_checkpoint_gives_our_logits_in_transformers(transformers, kind, tmp_path):
    hf_model(transformers, kind).save_pretrained(tmp_path / "theirs")
    config = ModelConfig.load(tmp_path / "theirs")
    weights = init_random(replace(config, initializer_range=0.15), 3, torch.float32)
    save_checkpoint(tmp_path / "ours", config, weights, max_shard_bytes=60_000)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    tokens = tokens_for(config)
    with torch.no_grad():
        theirs = model.eval()(tokens[None]).logits[0]
    assert next(model.parameters()).dtype == torch.float32
    torch.testing.assert_close(logits_of(config, weights, tokens), theirs, rtol=0, atol=2e-5)
    # And what transformers saves again is what we saved.
    model.save_pretrained(tmp_path / "again")
    config_again, weights_again = load_checkpoint(tmp_path / "again", torch.float32)
    assert config_again == config
    assert all(torch.equal(weights_again[name], weights[name]) for name in weights)


def paged_context(config: ModelConfig, blocks: int, dtype: torch.dtype) -> list[KeyValueCache]:
    return [
        KeyValueCache.allocate(blocks, 8, config.kv_heads, config.head_dim, dtype)
        for _ in range(config.layers)
    ]


def test_a_paged_cache_in_pieces_gives_the_bits_of_one_packed_pass(model):
    config, weights, decoder = model.config, model.weights(0), model.decoder()
    tokens = tokens_for(config)
    packed = decoder.forward(
        weights,
        tokens,
        torch.arange(TOKENS),
        VarlenAttention(torch.tensor([0, TOKENS], dtype=torch.int32)),
    )
    caches = paged_context(config, 6, torch.bfloat16)
    table = torch.tensor([[4, 1, 5]], dtype=torch.int32)
    for start, stop in ((0, 9), (9, 10), (10, 22), (22, 23)):
        positions = torch.arange(start, stop)
        context = PagedAttention(
            caches=caches,
            block_tables=table,
            query_starts=torch.tensor([0, stop - start], dtype=torch.int32),
            context_lengths=torch.tensor([stop], dtype=torch.int32),
            slots=table[0, positions // 8].long() * 8 + positions % 8,
        )
        piece = decoder.forward(weights, tokens[start:stop], positions, context)
        assert torch.equal(piece, packed[start:stop])


def test_gradients_change_no_bit_of_the_forward_pass(model):
    config, decoder = model.config, model.decoder()
    tokens, positions = tokens_for(config), torch.arange(TOKENS)
    attention = VarlenAttention(torch.tensor([0, 10, TOKENS], dtype=torch.int32))
    plain = decoder.forward(model.weights(0), tokens, positions, attention)
    leaves = {name: t.clone().requires_grad_() for name, t in model.weights(0).items()}
    graded = decoder.forward(leaves, tokens, positions, attention)
    assert graded.requires_grad
    assert torch.equal(graded.detach(), plain)


def run_routed(model, weights, hook):
    tokens = tokens_for(model.config)
    attention = VarlenAttention(torch.tensor([0, TOKENS], dtype=torch.int32))
    return model.decoder().forward(weights, tokens, torch.arange(TOKENS), attention, hook)


def recorder_of(model) -> RoutingRecorder:
    config = model.config
    return RoutingRecorder(config.moe_layers, config.experts, config.experts_per_token)


def replayer_of(model, ids, valid=None) -> RoutingReplayer:
    valid = torch.ones(TOKENS, dtype=torch.bool) if valid is None else valid
    return RoutingReplayer(ids, valid, model.config.moe_layers, model.config.experts)


def test_replaying_the_recorded_routes_changes_no_bit(moe_model):
    recorder = recorder_of(moe_model)
    live = run_routed(moe_model, moe_model.weights(0), recorder)
    replayer = replayer_of(moe_model, recorder.take())
    assert torch.equal(run_routed(moe_model, moe_model.weights(0), replayer), live)
    replayer.finish()


def test_replaying_other_routes_changes_the_result_except_where_they_are_not_valid(moe_model):
    recorder = recorder_of(moe_model)
    live = run_routed(moe_model, moe_model.weights(0), recorder)
    other = (recorder.take() + 1) % 8
    changed = run_routed(moe_model, moe_model.weights(0), replayer_of(moe_model, other))
    assert not torch.equal(changed, live)
    nowhere = replayer_of(moe_model, other, torch.zeros(TOKENS, dtype=torch.bool))
    assert torch.equal(run_routed(moe_model, moe_model.weights(0), nowhere), live)


def test_gradients_reach_the_router_through_replayed_routes(moe_model):
    recorder = recorder_of(moe_model)
    run_routed(moe_model, moe_model.weights(1), recorder)
    leaves = {name: t.clone().requires_grad_() for name, t in moe_model.weights(0).items()}
    run_routed(moe_model, leaves, replayer_of(moe_model, recorder.take())).float().sum().backward()
    for layer in moe_model.config.moe_layers:
        gradient = leaves[f"model.layers.{layer}.mlp.gate.weight"].grad
        assert gradient is not None
        assert gradient.abs().max() > 0


def test_weights_with_main_grad_collect_every_gradient_there_in_float32(model):
    tokens, positions = tokens_for(model.config), torch.arange(TOKENS)
    attention = VarlenAttention(torch.tensor([0, TOKENS], dtype=torch.int32))
    targets = tokens.roll(-1)

    def backward(leaves) -> None:
        hidden = model.decoder().forward(leaves, tokens, positions, attention)
        head = lm_head_weight(leaves)
        kernels.lm_head_logprob(hidden, head, targets, temperature=1.0)[0].sum().backward()

    plain = {name: t.clone().requires_grad_() for name, t in model.weights(0).items()}
    backward(plain)
    main = {name: t.clone().requires_grad_() for name, t in model.weights(0).items()}
    for tensor in main.values():
        tensor.main_grad = torch.zeros(tensor.shape)
    backward(main)
    for name, tensor in main.items():
        assert tensor.grad is None, name
        expected = plain[name].grad
        assert expected is not None
        scale = expected.float().abs().max() + 1e-6
        assert (tensor.main_grad - expected.float()).abs().max() < 0.02 * scale, name


def test_a_replay_of_a_layer_that_was_not_traced_is_refused(moe_model):
    recorder = recorder_of(moe_model)
    run_routed(moe_model, moe_model.weights(0), recorder)
    ids = recorder.take()[:, :1]
    replayer = RoutingReplayer(ids, torch.ones(TOKENS, dtype=torch.bool), (0,), 8)
    with pytest.raises(RoutingReplayError, match="layer 2 has no traced routing"):
        run_routed(moe_model, moe_model.weights(0), replayer)


@pytest.mark.parametrize("positions", [0, 257])
def test_the_rotary_table_cannot_exceed_the_model(dense_model, positions):
    with pytest.raises(ModelConfigError, match=f"max_positions is {positions}"):
        Decoder(dense_model.config, dense_model.contract, max_positions=positions)
