from __future__ import annotations

import json
from dataclasses import replace

import pytest

from integrations.errors import ModelConfigError
from integrations.trainer.model import ModelConfig, init_random

SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 100000,
    "rope_scaling": None,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_act": "silu",
    "pretraining_tp": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "sliding_window": 4096,
    "use_sliding_window": False,
    "eos_token_id": [5, 6],
}


def test_the_configuration_of_smollm2_is_read():
    config = ModelConfig.from_dict(SMOLLM2)
    assert (config.head_dim, config.kv_heads, config.rope_theta) == (64, 3, 100000.0)
    assert config.tie_word_embeddings
    assert not config.qk_norm
    assert config.moe_layers == ()
    assert config.eos_token_ids == (2,)
    assert config.parameters == 134_515_008


def test_the_configuration_of_a_qwen3_moe_is_read_in_both_spellings():
    config = ModelConfig.from_dict(QWEN3_MOE)
    assert config.moe_layers == (0, 1, 2, 3)
    assert (config.experts, config.experts_per_token) == (8, 2)
    assert config.rope_theta == 1000000.0
    assert config.qk_norm
    assert config.normalise_topk
    assert config.eos_token_ids == (5, 6)
    newer = dict(QWEN3_MOE)
    newer["num_local_experts"] = newer.pop("num_experts")
    assert ModelConfig.from_dict(newer) == config


def test_dense_layers_of_a_qwen3_moe_follow_the_rule_of_transformers():
    config = ModelConfig.from_dict(
        QWEN3_MOE | {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    )
    assert config.moe_layers == (1, 5)


@pytest.mark.parametrize("values", [SMOLLM2, QWEN3_MOE], ids=["llama", "qwen3_moe"])
def test_a_written_configuration_is_read_back(values):
    config = ModelConfig.from_dict(values)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("values", [SMOLLM2, QWEN3_MOE], ids=["llama", "qwen3_moe"])
def test_the_number_of_parameters_is_that_of_the_weights(values):
    config = ModelConfig.from_dict(values | {"num_hidden_layers": 2, "mlp_only_layers": [0]})
    weights = init_random(config, 0)
    assert config.parameters == sum(tensor.numel() for tensor in weights.values())


def test_random_weights_depend_on_the_seed_alone():
    config = replace(ModelConfig.from_dict(QWEN3_MOE), layers=1, moe_layers=(0,))
    one, same, other = (init_random(config, seed) for seed in (7, 7, 8))
    assert all(bool((one[name] == same[name]).all()) for name in one)
    assert any(bool((one[name] != other[name]).any()) for name in one)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; this decoder runs llama"),
        ({"model_type": None}, "model_type None"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling of type 'linear'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling of type 'llama3'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters of type 'yarn'"),
        ({"rope_parameters": [1]}, "rope_parameters is .* must be an object"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"sliding_window": 4096}, "sliding-window"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"n_shared_experts": 1}, "n_shared_experts is 1"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"pretraining_tp": 2}, "pretraining_tp 2"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "576"}, "hidden_size is '576'; it must be an integer"),
        ({"num_key_value_heads": 2}, r"heads \(9\) is not a multiple of kv_heads \(2\)"),
        ({"num_hidden_layers": 0}, "layers is 0"),
        ({"head_dim": 63}, "head_dim is 63"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
    ],
)
def test_what_the_decoder_cannot_run_is_named(changes, message):
    with pytest.raises(ModelConfigError, match=message):
        ModelConfig.from_dict(SMOLLM2 | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, "experts_per_token is 9 with 8 experts"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
    ],
)
def test_what_the_experts_cannot_be_is_named(changes, message):
    with pytest.raises(ModelConfigError, match=message):
        ModelConfig.from_dict(QWEN3_MOE | changes)


@pytest.mark.parametrize("layers", [(1, 0), (0, 0), (4,), (-1,)])
def test_moe_layers_must_be_layers_of_the_model_in_order(layers):
    with pytest.raises(ModelConfigError, match="moe_layers"):
        replace(ModelConfig.from_dict(QWEN3_MOE), moe_layers=layers)


def test_a_missing_folder_or_file_or_bad_json_is_one_line(tmp_path):
    with pytest.raises(ModelConfigError, match="nowhere does not exist"):
        ModelConfig.load(tmp_path / "nowhere")
    with pytest.raises(ModelConfigError, match=r"config\.json is missing"):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelConfigError, match=r"config\.json is not valid JSON"):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelConfigError, match="holds list, not a JSON object"):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2 | {"mlp_bias": True}))
    with pytest.raises(ModelConfigError, match=r"config\.json: mlp_bias") as caught:
        ModelConfig.load(tmp_path)
    assert "\n" not in str(caught.value)
