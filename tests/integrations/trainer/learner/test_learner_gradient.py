"""The gradient of the learner's whole loss against transformers in fp64."""

from __future__ import annotations

import math

import pytest
import torch

from consistency import kernels
from consistency.contract import NumericsContract
from integrations.trainer.learner.batch import pack_supervised
from integrations.trainer.model import Decoder, load_checkpoint
from integrations.trainer.model.attention import VarlenAttention
from integrations.trainer.model.weights import lm_head_weight

TEMPERATURE = 0.7
EXAMPLES = [((5, 17, 40, 2), (8, 30)), ((1,), (60, 7, 7, 12)), ((33, 9), (4,))]


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3"])
def model(request):
    transformers = pytest.importorskip("transformers")
    common = {
        "vocab_size": 61,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "initializer_range": 0.15,
        "max_position_embeddings": 64,
        "attn_implementation": "eager",
    }
    torch.manual_seed(0)
    if request.param == "qwen3":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**common))
    else:
        moe = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        config = transformers.Qwen3MoeConfig(**common, **moe, norm_topk_prob=True)
        model = transformers.Qwen3MoeForCausalLM(config)
        model.set_experts_implementation("eager")
    return model


def policy_gradient_weights(count: int) -> torch.Tensor:
    """What advantages and importance weights multiply the logprobs with; of both signs."""
    return torch.linspace(-1.5, 2.0, count, dtype=torch.float64)


def reference_gradients(model) -> dict[str, torch.Tensor]:
    """d (sum of weight * logprob) in fp64, sequence by sequence."""
    model = model.double().eval()
    model.zero_grad()
    logprobs = []
    for prompt, answer in EXAMPLES:
        tokens = torch.tensor([[*prompt, *answer]])
        logits = model(tokens[:, :-1]).logits[0, len(prompt) - 1 :] / TEMPERATURE
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])
        logprobs.append(chosen[:, 0])
    stacked = torch.cat(logprobs)
    (stacked * policy_gradient_weights(len(stacked))).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def our_gradients(folder, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    config, weights = load_checkpoint(folder, dtype)
    contract = NumericsContract(compute_dtype=str(dtype).removeprefix("torch."))
    for weight in weights.values():
        weight.requires_grad_(True)
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
    batch = pack_supervised(EXAMPLES)
    hidden = Decoder(config, contract).forward(
        weights, batch.token_ids, batch.positions, VarlenAttention(batch.cu_seqlens), None
    )
    logprobs, _ = kernels.lm_head_logprob(
        hidden.index_select(0, batch.selected),
        lm_head_weight(weights),
        batch.targets,
        temperature=TEMPERATURE,
    )
    (logprobs * policy_gradient_weights(len(logprobs)).float()).sum().backward()
    return {name: weight.main_grad for name, weight in weights.items()}  # type: ignore[attr-defined]


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    difference = torch.linalg.vector_norm(ours.double() - reference)
    return float(difference / torch.linalg.vector_norm(reference))


# What our model keeps as one tensor, and transformers as several.
FUSED = {
    "qkv_proj.weight": ("q_proj.weight", "k_proj.weight", "v_proj.weight"),
    "mlp.gate_up_proj.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
}


def reference_of(name: str, reference: dict[str, torch.Tensor]) -> torch.Tensor:
    for fused, parts in FUSED.items():
        if name.endswith(fused):
            return torch.cat([reference[name.removesuffix(fused) + part] for part in parts])
    return reference[name]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 5e-6), (torch.bfloat16, 5e-2)])
def test_every_weights_gradient_is_that_of_transformers_in_fp64(model, dtype, bound, tmp_path):
    # The reference starts from the rounded weights, so that only the arithmetic is compared.
    model = model.to(dtype)
    model.save_pretrained(tmp_path)
    reference = reference_gradients(model)
    ours = our_gradients(tmp_path, dtype)
    for name, gradient in ours.items():
        # bf16 routers see a difference of experts' outputs, which cancels.
        limit = 4 * bound if "mlp.gate.weight" in name else bound
        error = relative_error(gradient, reference_of(name, reference))
        assert math.isfinite(error), name
        assert error < limit, f"{name}: {error:.2e}"
