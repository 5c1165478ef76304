"""`lockstep quant`: export and audit of folders, exit codes, JSON, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from consistency.quant import QuantSettings, ScaleRule, qdq
from integrations.cli import main
from integrations.trainer.model import ModelConfig, init_random, save_checkpoint

RECIPE = Path(__file__).parents[2] / "recipes" / "mxfp4.yaml"
RCEIL = QuantSettings(scale_rule=ScaleRule.RCEIL)
CONFIG = ModelConfig(
    model_type="qwen3_moe",
    hidden_size=64,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=32,
    intermediate_size=64,
    vocab_size=16,
    max_positions=64,
    qk_norm=True,
    experts=3,
    experts_per_token=2,
    moe_intermediate_size=32,
    moe_layers=(0, 1),
)


@pytest.fixture
def dense(tmp_path) -> Path:
    save_checkpoint(tmp_path / "dense", CONFIG, init_random(CONFIG, seed=0))
    return tmp_path / "dense"


@pytest.fixture
def run_dir(tmp_path) -> Path:
    """What a run of recipes/mxfp4.yaml leaves: its recipe, and final weights after a QDQ."""
    folder = tmp_path / "run"
    weights = init_random(CONFIG, seed=0)
    for name, weight in weights.items():
        if weight.dim() == 3:
            weights[name] = qdq(weight, RCEIL)
    save_checkpoint(folder / "final", CONFIG, weights)
    (folder / "recipe.yaml").write_text(RECIPE.read_text())
    return folder


def export(source: Path, out: Path, *options: str) -> int:
    return main(["quant", "export", str(source), str(out), "--layout", "compressed-tensors",
                 *options])  # fmt: skip


def audit(engine: Path, *options: str) -> int:
    return main(["quant", "audit", str(engine), *options])


def test_a_run_is_exported_and_its_export_holds_the_runs_values(run_dir, tmp_path, capsys):
    out, file = tmp_path / "served", tmp_path / "audit.json"
    assert export(run_dir, out) == 0
    assert "18 matrices of 39 tensors packed, rceil, compressed-tensors" in capsys.readouterr().out
    assert audit(out, "--trainer", str(run_dir), "--json", str(file)) == 0
    result = json.loads(file.read_text())
    assert result["passed"] is True
    assert result["layout"] == "compressed-tensors"
    assert result["settings"] == result["engine_settings"] == RCEIL.to_mapping()
    assert len(result["matrices"]) == 39
    assert {record["status"] for record in result["matrices"]} == {"equal"}
    assert audit(out) == 0
    assert "compressed-tensors, scale rule rceil" in capsys.readouterr().out


def test_a_checkpoint_is_exported_by_targets_and_exclusions(dense, tmp_path, capsys):
    name = "model.layers.0.self_attn.q_proj"
    options = ("--scale-rule", "even", "--targets", "linears", "--exclude", f"{name}.weight")
    assert export(dense, tmp_path / "a", *options) == 0
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    assert f"{name}.weight" in tensors
    assert "model.layers.1.self_attn.q_proj.weight_packed" in tensors
    for kept in ("model.embed_tokens", "lm_head", "model.layers.0.mlp.gate"):
        assert f"{kept}.weight" in tensors
    ignored = json.loads((tmp_path / "a" / "config.json").read_text())
    assert name in ignored["quantization_config"]["ignore"]
    # The header of the engine's own checkpoint says which rule; nothing else does.
    assert audit(tmp_path / "a", "--trainer", str(dense)) == 0
    assert audit(tmp_path / "a", "--trainer", str(dense), "--targets", "experts") == 1
    assert "the trainer's is dense" in " ".join(capsys.readouterr().out.split())


def test_another_rule_ends_with_code_1_and_its_name(dense, tmp_path, capsys):
    assert export(dense, tmp_path / "served", "--scale-rule", "floor") == 0
    file = tmp_path / "audit.json"
    options = ("--trainer", str(dense), "--scale-rule", "rceil", "--json", str(file))
    assert audit(tmp_path / "served", *options) == 1
    output = " ".join(capsys.readouterr().out.split())
    assert "scale rule floor" in output and "own header says floor" in output
    records = json.loads(file.read_text())["matrices"]
    differing = [record for record in records if record["status"] == "differs"]
    assert len(differing) == 18
    assert {record["cause"] for record in differing} == {"scale rule floor"}
    assert all(record["values_differ"] > 0 for record in differing)


def test_a_damaged_scale_ends_with_code_1(dense, tmp_path, capsys):
    assert export(dense, tmp_path / "served", "--scale-rule", "floor") == 0
    file = tmp_path / "served" / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("weight_scale"))
    tensors[name][0, 0] = 255
    save_file(tensors, file)
    assert audit(tmp_path / "served") == 1
    assert "damaged" in capsys.readouterr().out


def test_bad_input_ends_with_one_line_and_code_2(dense, run_dir, tmp_path, capsys):
    out = tmp_path / "out"
    assert export(dense, tmp_path / "served", "--scale-rule", "even") == 0
    save_file(load_file(tmp_path / "served" / "model.safetensors"), tmp_path / "plain")
    (tmp_path / "plain").replace(tmp_path / "served" / "model.safetensors")
    capsys.readouterr()
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "recipe.yaml").write_text(RECIPE.read_text())
    cases = [
        (export(dense, out), "give --scale-rule floor, even, rceil or ceil"),
        (export(dense, out, "--scale-rule", "up"), "'up' is not one of"),
        (export(dense, out, "--scale-rule", "even", "--exclude", "gate"), "no such tensor"),
        (export(tmp_path / "nowhere", out), "there is no such folder"),
        (export(tmp_path / "unfinished", out), "the run has not ended"),
        (export(tmp_path / "served", out), "is quantised already"),
        (export(run_dir, out, "--targets", "linears"), "changes when it is packed"),
        (export(dense, dense, "--scale-rule", "even"), "exists already"),
        (main(["quant", "export", str(dense), str(out), "--layout", "gpt-oss", "--scale-rule",
               "even"]), "engines read the layout gpt-oss for 'gpt_oss' alone"),
        (audit(dense), "has no quantization_config"),
        (audit(tmp_path / "served", "--trainer", str(dense)), "give --scale-rule"),
        (audit(tmp_path / "served", "--json", "/nowhere/a.json"), "folder /nowhere does not"),
    ]  # fmt: skip
    errors = capsys.readouterr().err.splitlines()
    assert [code for code, _ in cases] == [2] * len(cases)
    assert len(errors) == len(cases)
    for line, (_, reason) in zip(errors, cases, strict=True):
        assert reason in line
    assert not out.exists()


def test_dense_gpt_oss_experts_are_transposed_and_transformers_loads_their_export(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GptOssConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_local_experts=2,
        num_experts_per_tok=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    trained = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for tensor in trained.state_dict().values():
        torch.nn.init.normal_(tensor)
    trained.save_pretrained(tmp_path / "dense")
    options = ["--layout", "gpt-oss", "--scale-rule", "rceil"]
    dense, out = str(tmp_path / "dense"), str(tmp_path / "out")
    assert main(["quant", "export", dense, out, *options]) == 0
    assert main(["quant", "audit", out, "--trainer", dense]) == 0
    served = transformers.AutoModelForCausalLM.from_pretrained(out).state_dict()
    for name, weight in trained.state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            weight = qdq(weight.transpose(1, 2), RCEIL).transpose(1, 2)
        assert torch.equal(served[name], weight), name
