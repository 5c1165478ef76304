"""Checkpoints for the real engines: random models with peaked logits, where a wrong bit shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
# What two ranks share: an even number of layers, experts that the contract cuts in two.
FOR_TWO_RANKS: dict[str, Any] = {"num_hidden_layers": 4, "moe_intermediate_size": 128}
TIED: dict[str, Any] = {"tie_word_embeddings": True}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Makes the checkpoint folder of a model, once: `checkpoint("moe")`."""
    import transformers

    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name in made:
            return made[name]
        torch.manual_seed(0)
        if name == "moe":
            config = transformers.Qwen3MoeConfig(**SIZES, **EXPERTS)
        elif name == "moe for two ranks":
            config = transformers.Qwen3MoeConfig(**{**SIZES, **EXPERTS, **FOR_TWO_RANKS})
        elif name == "dense for two ranks":
            config = transformers.Qwen3Config(**{**SIZES, **FOR_TWO_RANKS, **TIED})
        elif name == "llama":
            config = transformers.LlamaConfig(**SIZES)
        else:
            config = transformers.Qwen3Config(**SIZES)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.12)
        folder = made[name] = tmp_path_factory.mktemp("models") / name
        model.save_pretrained(folder)
        return folder

    return make
