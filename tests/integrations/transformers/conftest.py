"""Tiny transformers models with peaked logits, so that a wrong bit moves a probability."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="pip install 'lockstep-rl[transformers]'")

COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def make_model(kind: str, dtype: torch.dtype = torch.bfloat16, **changes):
    """A random model whose weights are large enough for peaked distributions."""
    torch.manual_seed(0)
    if kind == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(
            **COMMON, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
            norm_topk_prob=True, mlp_only_layers=[0], decoder_sparse_step=1, **changes,
        )  # fmt: skip
    elif kind == "qwen3":
        config = transformers.Qwen3Config(**COMMON, tie_word_embeddings=True, **changes)
    else:
        config = transformers.LlamaConfig(**COMMON, **changes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15 if "embed" in name else 0.1)
    return model.eval()


@pytest.fixture(params=["llama", "qwen3", "qwen3_moe"])
def kind(request) -> str:
    return request.param


@pytest.fixture
def model(kind: str):
    return make_model(kind)
