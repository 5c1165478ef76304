"""Exported MXFP4 experts in vLLM's own CPU kernel: it computes with the trained values."""

# vLLM is installed beside the engine tests only.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from consistency.quant import (
    CheckpointLayout,
    PackedTensor,
    QuantSettings,
    ScaleRule,
    export_checkpoint,
    pack,
    unpack,
)

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

EXPERTS = "model.layers.0.mlp.experts"
HIDDEN, WIDTH = 128, 64
RCEIL = QuantSettings(scale_rule=ScaleRule.RCEIL)


def served(folder) -> tuple[torch.Tensor, ...]:
    """The exported tensors of the only expert, stacked as vLLM stacks them: w13, w2, scales."""
    tensors = load_file(folder / "model.safetensors")
    found = []
    for part in ("weight_packed", "weight_scale"):
        gate, up, down = (
            tensors[f"{EXPERTS}.0.{name}.{part}"] for name in ("gate_proj", "up_proj", "down_proj")
        )
        found += [torch.cat((gate, up))[None], down[None]]
    return found[0], found[1], found[2], found[3]


def experts_of_vllm(folder, x: torch.Tensor) -> torch.Tensor:
    """Down(silu(gate x) * (up x)) in vLLM's kernel, [tokens, HIDDEN]."""
    from vllm._custom_ops import CPUQuantMethod, fused_experts_cpu
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (
        prepare_mxfp4_moe_layer_for_cpu,
    )

    if not hasattr(torch.ops._C, "convert_scale_packed"):
        pytest.skip(
            "this build of vLLM has no MXFP4 kernel: only its build for AVX-512 with bf16 has one"
        )
    w13, w2, w13_scale, w2_scale = served(folder)
    w13, w2, w13_scale, w2_scale = prepare_mxfp4_moe_layer_for_cpu(w13, w2, w13_scale, w2_scale)
    out = torch.empty(len(x), HIDDEN, dtype=torch.bfloat16)
    ids = torch.zeros(len(x), 1, dtype=torch.int32)
    fused_experts_cpu(
        out,
        x,
        w13,
        w2,
        torch.ones(len(x), 1),
        ids,
        CPUQuantMethod.MXFP4,
        w13_scale,
        w2_scale,
        None,
        None,
        None,
    )
    return out


def export(folder, gate, up, down) -> None:
    weights: dict[str, torch.Tensor | PackedTensor] = {
        f"{EXPERTS}.0.{name}.weight": weight
        if isinstance(weight, PackedTensor)
        else pack(weight, RCEIL)
        for name, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down))
    }
    config = {"model_type": "qwen3_moe"}
    export_checkpoint(folder, weights, config, layout=CheckpointLayout.COMPRESSED_TENSORS)


@pytest.mark.parametrize("tokens", [1, 4, 64])
def test_one_hot_inputs_read_back_the_down_projection(tokens, tmp_path):
    torch.manual_seed(0)
    down = pack(torch.randn(HIDDEN, WIDTH) * 0.02, RCEIL)
    # gate x = 32 and up x = 1/32 where x is hot, so silu(gate x) (up x) is exactly 1 there.
    hot = torch.eye(WIDTH, HIDDEN)
    export(tmp_path / "out", 32 * hot, hot / 32, down)
    inputs = torch.eye(WIDTH, HIDDEN).bfloat16()
    found = torch.cat([experts_of_vllm(tmp_path / "out", part) for part in inputs.split(tokens)])
    assert torch.equal(found.t(), unpack(down))


def test_one_hot_inputs_read_back_the_up_projection(tmp_path):
    torch.manual_seed(1)
    up = pack(torch.randn(WIDTH, HIDDEN) * 0.02, RCEIL)
    export(tmp_path / "out", torch.full((WIDTH, HIDDEN), 32.0), up, torch.eye(HIDDEN, WIDTH) / 32)
    found = experts_of_vllm(tmp_path / "out", torch.eye(HIDDEN).bfloat16())
    assert torch.equal(found[:, :WIDTH].t(), unpack(up))
    assert not found[:, WIDTH:].any()


def written_config(folder, layout: CheckpointLayout, model_type: str) -> dict[str, Any]:
    weights: dict[str, torch.Tensor | PackedTensor] = {
        f"{EXPERTS}.gate_up_proj": pack(torch.randn(2, 64, 32), RCEIL),
        f"{EXPERTS}.down_proj": pack(torch.randn(2, 32, 32), RCEIL),
        "layers.0.attn.wq.weight": torch.randn(32, 32).bfloat16(),
    }
    export_checkpoint(folder, weights, {"model_type": model_type}, layout=layout)
    return json.loads((folder / "config.json").read_text())


def test_vllm_takes_the_configuration_of_every_layout(tmp_path):
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )
    from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config
    from vllm.models.deepseek_v4.quant_config import DeepseekV4FP8Config

    written = written_config(tmp_path / "c", CheckpointLayout.COMPRESSED_TENSORS, "qwen3_moe")
    config = CompressedTensorsConfig.from_config(written["quantization_config"])
    scheme = config.target_scheme_map["Linear"]
    assert config._is_mxfp4(scheme["weights"]) and scheme["input_activations"] is None
    assert config.ignore == ["layers.0.attn.wq", "lm_head"]

    for layout, kind, name in (
        (CheckpointLayout.GPT_OSS, GptOssMxfp4Config, "gpt_oss_mxfp4"),
        (CheckpointLayout.DEEPSEEK_V4, DeepseekV4FP8Config, "deepseek_v4_fp8"),
    ):
        model_type = layout.value.replace("-", "_")
        written = written_config(tmp_path / name, layout, model_type)
        quantisation = written["quantization_config"]
        model = SimpleNamespace(model_type=model_type)
        assert kind.override_quantization_method(quantisation, None, model) == name
        found = kind.from_config(quantisation)
    # vLLM's GPT-OSS takes every linear for bf16 and has no list; the last one is DeepSeek's.
    assert found.ignored_layers == ["layers.0.attn.wq"]
    assert found.weight_block_size == [128, 128]
    assert written["expert_dtype"] == "fp4"
