"""Exported checkpoints: the codec's bytes in every layout, read back, and read by other loaders."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.quant import BlockFormat, PackedTensor, QuantSettings, ScaleRule, pack, unpack
from consistency.quant.checkpoint import CheckpointReader
from consistency.quant.export import export_checkpoint
from consistency.quant.layouts import CheckpointLayout, matrices_of

RCEIL = QuantSettings(scale_rule=ScaleRule.RCEIL)
EXPERTS = "model.layers.{}.mlp.experts"
GPT_OSS, COMPRESSED, DEEPSEEK = (
    CheckpointLayout.GPT_OSS,
    CheckpointLayout.COMPRESSED_TENSORS,
    CheckpointLayout.DEEPSEEK_V4,
)
CONFIGS = {
    GPT_OSS: {"model_type": "gpt_oss"},
    COMPRESSED: {"model_type": "qwen3_moe"},
    DEEPSEEK: {"model_type": "deepseek_v4"},
}


def model(
    layers: int = 2, settings: QuantSettings = RCEIL
) -> dict[str, torch.Tensor | PackedTensor]:
    """Experts packed and stacked, gate above up; everything else in bf16."""
    torch.manual_seed(0)
    weights: dict[str, torch.Tensor | PackedTensor] = {}
    for layer in range(layers):
        prefix = EXPERTS.format(layer)
        weights[f"{prefix}.gate_up_proj"] = pack(torch.randn(3, 2 * 32, 64), settings)
        weights[f"{prefix}.down_proj"] = pack(torch.randn(3, 64, 32), settings)
        weights[f"layers.{layer}.gate.weight"] = torch.randn(3, 64).bfloat16()
    weights["norm.weight"] = torch.randn(64)
    return weights


def matrices(weights) -> dict[str, PackedTensor]:
    return {
        name: matrix
        for stacked, weight in weights.items()
        if isinstance(weight, PackedTensor)
        for name, matrix in matrices_of(stacked, weight, "stacked")
    }


@pytest.mark.parametrize("layout", CheckpointLayout, ids=lambda layout: layout.value)
@pytest.mark.parametrize("limit", [1 << 30, 6000])
def test_every_layout_reads_back_the_bytes_that_were_packed(layout, limit, tmp_path):
    weights = model()
    export_checkpoint(
        tmp_path / "out", weights, CONFIGS[layout], layout=layout, max_file_bytes=limit
    )
    assert ((tmp_path / "out" / "model.safetensors.index.json").exists()) == (limit == 6000)
    expected = matrices(weights)
    with CheckpointReader(tmp_path / "out") as reader:
        assert reader.layout is layout
        assert reader.settings == RCEIL
        assert set(reader.packed_names) == set(expected)
        for name, matrix in expected.items():
            found = reader.packed(name)
            assert torch.equal(found.codes, matrix.codes)
            assert torch.equal(found.scales, matrix.scales)
            assert found.settings == RCEIL
        dense = {n: w for n, w in weights.items() if isinstance(w, torch.Tensor)}
        assert set(reader.dense_names) == set(dense)
        for name, tensor in dense.items():
            assert torch.equal(reader.dense(name), tensor)
            assert reader.dense(name).dtype == tensor.dtype


def test_gpt_oss_interleaves_rows_and_deepseek_uses_its_own_names_and_dtypes(tmp_path):
    weights = model(1)
    expected = matrices(weights)
    prefix = EXPERTS.format(0)
    export_checkpoint(tmp_path / "g", weights, CONFIGS[GPT_OSS], layout=GPT_OSS)
    tensors = load_file(tmp_path / "g" / "model.safetensors")
    blocks = tensors[f"{prefix}.gate_up_proj_blocks"]
    assert blocks.shape == (3, 64, 2, 16) and blocks.dtype == torch.uint8
    assert tensors[f"{prefix}.gate_up_proj_scales"].shape == (3, 64, 2)
    assert tensors[f"{prefix}.down_proj_blocks"].shape == (3, 64, 1, 16)
    for row, side in ((0, "gate_proj"), (1, "up_proj")):
        codes = expected[f"{prefix}.1.{side}.weight"].codes
        assert torch.equal(blocks[1, row::2].flatten(1), codes)
    export_checkpoint(tmp_path / "d", weights, CONFIGS[DEEPSEEK], layout=DEEPSEEK)
    tensors = load_file(tmp_path / "d" / "model.safetensors")
    for short, side in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
        weight = tensors[f"layers.0.ffn.experts.2.{short}.weight"]
        scale = tensors[f"layers.0.ffn.experts.2.{short}.scale"]
        matrix = expected[f"{prefix}.2.{side}.weight"]
        assert weight.dtype == torch.int8 and scale.dtype == torch.float8_e8m0fnu
        assert torch.equal(weight.view(torch.uint8), matrix.codes)
        assert torch.equal(scale.view(torch.uint8), matrix.scales)


@pytest.mark.parametrize("gate_up", ["stacked", "interleaved"])
def test_matrices_and_stacked_experts_of_either_order_export_the_same_bytes(gate_up, tmp_path):
    gate, up, down = (torch.randn(2, 32, 32) for _ in range(3))
    fused = torch.cat((gate, up), 1)
    if gate_up == "interleaved":
        fused = torch.stack((gate, up), 2).flatten(1, 2)
    prefix = EXPERTS.format(7)
    stacked = {
        f"{prefix}.gate_up_proj": pack(fused, RCEIL),
        f"{prefix}.down_proj": pack(down, RCEIL),
        f"{prefix}.gate_up_proj_bias": (
            torch.arange(64.0).view(32, 2).t().reshape(1, 64).expand(2, 64)
            if gate_up == "stacked"
            else torch.arange(64.0).expand(2, 64)
        ),
    }
    single = {
        f"{prefix}.{expert}.{side}.weight": pack(weight[expert], RCEIL)
        for side, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down))
        for expert in range(2)
    }
    for name, weights in (("a", stacked), ("b", single)):
        export_checkpoint(
            tmp_path / name, weights, CONFIGS[GPT_OSS], layout=GPT_OSS, gate_up=gate_up
        )
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    bias = first.pop(f"{prefix}.gate_up_proj_bias")
    assert torch.equal(bias, torch.arange(64.0).expand(2, 64))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_transformers_loads_gpt_oss_with_our_values(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GptOssConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=64,
        layer_types=["sliding_attention", "full_attention"],
        pad_token_id=0,
    )
    torch.manual_seed(0)
    trained = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    weights: dict[str, torch.Tensor | PackedTensor] = {}
    for name, tensor in trained.state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            torch.nn.init.normal_(tensor)
            weights[name] = pack(tensor.transpose(1, 2), RCEIL)
        else:
            weights[name] = torch.nn.init.normal_(tensor)
    export_checkpoint(
        tmp_path / "out", weights, config.to_dict(), layout=GPT_OSS, gate_up="interleaved"
    )
    served = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    found = served.state_dict()
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        if isinstance(weight, PackedTensor):
            assert torch.equal(found[name], unpack(weight).transpose(1, 2)), name
        else:
            assert torch.equal(found[name], weight), name


def test_transformers_dequantises_deepseek_experts_to_our_values(tmp_path):
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    weights = model(1)
    export_checkpoint(tmp_path / "out", weights, CONFIGS[DEEPSEEK], layout=DEEPSEEK)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    loader = fp8.Fp8Dequantize(None)
    for name, short in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")):
        stem = f"layers.0.ffn.experts.1.{short}"
        found = loader._dequantize_one(tensors[f"{stem}.weight"], tensors[f"{stem}.scale"])
        expected = matrices(weights)[f"{EXPERTS.format(0)}.1.{name}.weight"]
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, unpack(expected))


def test_compressed_tensors_reads_the_config_and_our_values(tmp_path):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    weights = model(1)
    export_checkpoint(tmp_path / "out", weights, CONFIGS[COMPRESSED], layout=COMPRESSED)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    config = QuantizationConfig.model_validate(written["quantization_config"])
    scheme: Any = config.config_groups["group_0"]
    assert config.ignore == ["layers.0.gate", "lm_head"]
    assert scheme.input_activations is None
    compressor: Any = BaseCompressor.get_value_from_registry(config.format)
    assert compressor.can_compress(torch.nn.Linear, scheme)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for name, matrix in matrices(weights).items():
        stem = name.removesuffix(".weight")
        state = {key: tensors[f"{stem}.{key}"] for key in ("weight_packed", "weight_scale")}
        found = compressor.decompress(state, scheme)["weight"]
        assert torch.equal(found, unpack(matrix, dtype=found.dtype))


def test_transformers_loads_compressed_tensors_with_our_values(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
    )
    torch.manual_seed(0)
    trained = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    weights: dict[str, torch.Tensor | PackedTensor] = {}
    for name, tensor in trained.state_dict().items():
        torch.nn.init.normal_(tensor)
        linear = "_proj" in name and "k_proj" not in name
        weights[name] = pack(tensor, RCEIL) if linear else tensor
    export_checkpoint(tmp_path / "out", weights, config.to_dict(), layout=COMPRESSED)
    served = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out",
        quantization_config=transformers.CompressedTensorsConfig(run_compressed=False),
    )
    found = served.state_dict()
    for name, weight in weights.items():
        values = unpack(weight) if isinstance(weight, PackedTensor) else weight
        assert torch.equal(found[name].bfloat16(), values), name


def test_what_has_no_place_in_a_layout_is_refused_and_nothing_is_written(tmp_path):
    out, linear = tmp_path / "out", {"model.q_proj.weight": pack(torch.randn(4, 32), RCEIL)}
    prefix = EXPERTS.format(0)
    whole = model(1)
    half = {k: v for k, v in matrices(whole).items() if ".2.up_proj" not in k}
    mixed = {
        **whole,
        f"{prefix}.extra.weight": pack(
            torch.randn(4, 32), QuantSettings(scale_rule=ScaleRule.FLOOR)
        ),
    }
    eight = pack(
        torch.randn(4, 32), QuantSettings(scale_rule=ScaleRule.RCEIL, format=BlockFormat.MXFP8)
    )
    broken = pack(torch.randn(4, 32), RCEIL)
    broken.scales[2, 0] = 255
    dense = {**whole, f"{EXPERTS.format(1)}.gate_up_proj": torch.randn(3, 64, 64)}
    cases = [
        (linear, GPT_OSS, "model.q_proj.weight is packed, but gpt-oss packs experts alone"),
        (linear, DEEPSEEK, "model.q_proj.weight is packed, but deepseek-v4 packs experts alone"),
        (half, GPT_OSS, r"up_proj is packed for the experts|gate, up and down have 3, 2 and 3"),
        (mixed, COMPRESSED, "packed with different settings"),
        ({"a.weight": eight}, COMPRESSED, "a.weight is mxfp8"),
        ({"a.weight": broken}, COMPRESSED, "scale byte 255"),
        ({"a": pack(torch.randn(4, 32), RCEIL)}, COMPRESSED, "the name of a matrix ends in"),
        ({"a": pack(torch.randn(2, 4, 32), RCEIL)}, COMPRESSED, "three dimensions are known"),
        (dense, GPT_OSS, "layers.1.mlp.experts.0.gate_proj.weight is dense, but gpt-oss"),
        ({**whole, "model.norm.weight": torch.ones(4)}, DEEPSEEK, "names its tensors itself"),
        ({**whole, "n": torch.tensor([float("nan")])}, COMPRESSED, "n holds NaN or infinity"),
        ({**whole, f"{prefix}.0.up_proj.weight": matrices(whole)[f"{prefix}.0.up_proj.weight"]},
         COMPRESSED, "given twice"),
        ({"n": torch.ones(2)}, COMPRESSED, "no weight is packed"),
    ]  # fmt: skip
    for weights, layout, reason in cases:
        with pytest.raises(InvalidInputError, match=reason):
            export_checkpoint(out, weights, CONFIGS[layout], layout=layout)
    with pytest.raises(InvalidInputError, match="quantization_config already"):
        export_checkpoint(out, whole, {"quantization_config": {"a": 1}}, layout=GPT_OSS)
    with pytest.raises(InvalidInputError, match="model_type 'llama', but engines read"):
        export_checkpoint(out, whole, {"model_type": "llama"}, layout=GPT_OSS)
    with pytest.raises(UnsupportedError, match="layout is 'gpt-oss'"):
        export_checkpoint(out, whole, CONFIGS[GPT_OSS], layout="gpt-oss")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="gate_up is 'mixed'"):
        export_checkpoint(out, whole, CONFIGS[GPT_OSS], layout=GPT_OSS, gate_up="mixed")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    export_checkpoint(out, whole, CONFIGS[GPT_OSS], layout=GPT_OSS)
    with pytest.raises(InvalidInputError, match="exists already"):
        export_checkpoint(out, whole, CONFIGS[GPT_OSS], layout=GPT_OSS)


@pytest.fixture
def folder(tmp_path):
    export_checkpoint(tmp_path / "out", model(1), CONFIGS[COMPRESSED], layout=COMPRESSED)
    return tmp_path / "out"


def rewrite(folder, change) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_a_reader_refuses_what_it_cannot_tell_for_certain(folder):
    name = f"{EXPERTS.format(0)}.0.down_proj.weight"
    settings = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32,
                "symmetric": True}  # fmt: skip

    def config(**quantisation) -> None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": quantisation}))

    def refused(reason: str, kind: type[Exception] = InvalidInputError) -> None:
        with pytest.raises(kind, match=reason):
            CheckpointReader(folder)

    whole = (folder / "config.json").read_text()
    config(quant_method="awq")
    refused("quant_method 'awq' is not known", UnsupportedError)
    config(quant_method="fp8")
    refused("expert_dtype None", UnsupportedError)
    for key, value in (("num_bits", 8), ("group_size", 16), ("type", "int")):
        group = {"weights": {**settings, key: value}}
        config(quant_method="compressed-tensors", config_groups={"g": group})
        refused(f"weights.{key} = ", UnsupportedError)
    group = {"weights": settings, "input_activations": {"num_bits": 8}}
    config(quant_method="compressed-tensors", config_groups={"g": group})
    refused("quantises input_activations too", UnsupportedError)
    config(quant_method="mxfp4")
    refused("looks like a part of a packed weight")
    (folder / "config.json").write_text("{}")
    refused("config.json says nothing of quantisation")
    (folder / "config.json").write_text(whole)

    rewrite(folder, lambda tensors: None)
    with CheckpointReader(folder) as reader:
        assert reader.settings is None
        with pytest.raises(InvalidInputError, match="does not say how it was quantised"):
            reader.packed(name)
        assert reader.packed(name, RCEIL).settings == RCEIL
        with pytest.raises(InvalidInputError, match="no packed matrix nobody"):
            reader.packed("nobody", RCEIL)
        with pytest.raises(InvalidInputError, match="no dense tensor nobody"):
            reader.dense("nobody")
    key = f"{name}_scale"
    rewrite(folder, lambda tensors: tensors.update({key: tensors[key].float()}))
    refused("weight_scale is F32, not U8")
    rewrite(folder, lambda tensors: tensors.update({key: tensors[key][:-1].byte()}))
    refused("asks for")
    rewrite(folder, lambda tensors: tensors.pop(key))
    refused("has no weight_scale")
    (folder / "model.safetensors").write_bytes(b"short")
    refused("damaged or truncated")
    (folder / "model.safetensors").unlink()
    refused("holds neither")
    (folder / "config.json").unlink()
    refused("config.json is missing")
