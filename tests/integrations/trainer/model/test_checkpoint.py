from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from integrations.errors import CheckpointError
from integrations.trainer.model import init_random, load_checkpoint, save_checkpoint


def equal(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def saved(moe_model, tmp_path):
    save_checkpoint(tmp_path, moe_model.config, moe_model.weights(0))
    return tmp_path


def rewrite(folder, change) -> None:
    """Change the tensors of a saved checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_saved_checkpoint_is_loaded_bit_for_bit(model, tmp_path):
    save_checkpoint(tmp_path, model.config, model.weights(0))
    config, weights = load_checkpoint(tmp_path)
    assert config == model.config
    assert equal(weights, model.weights(0))


def test_a_sharded_checkpoint_is_loaded_through_its_index(moe_model, tmp_path):
    save_checkpoint(tmp_path, moe_model.config, moe_model.weights(0), max_shard_bytes=20_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    assert equal(load_checkpoint(tmp_path)[1], moe_model.weights(0))
    save_checkpoint(tmp_path, moe_model.config, moe_model.weights(1))
    assert equal(load_checkpoint(tmp_path)[1], moe_model.weights(1))


def test_float32_weights_keep_their_bits_and_convert_on_request(dense_model, tmp_path):
    weights = init_random(dense_model.config, 4, torch.float32)
    save_checkpoint(tmp_path, dense_model.config, weights)
    assert equal(load_checkpoint(tmp_path, torch.float32)[1], weights)
    rounded = {name: tensor.bfloat16() for name, tensor in weights.items()}
    assert equal(load_checkpoint(tmp_path)[1], rounded)


def test_experts_stored_fused_are_read_as_well(moe_model, saved):
    def fuse(tensors):
        for layer in moe_model.config.moe_layers:
            stem = f"model.layers.{layer}.mlp.experts"
            for name in [name for name in tensors if name.startswith(stem)]:
                del tensors[name]
            for field in ("gate_up_proj", "down_proj"):
                tensors[f"{stem}.{field}"] = moe_model.weights(0)[f"{stem}.{field}"]

    rewrite(saved, fuse)
    assert equal(load_checkpoint(saved)[1], moe_model.weights(0))


def test_a_tied_head_that_is_stored_anyway_is_ignored(dense_model, tmp_path):
    save_checkpoint(tmp_path, dense_model.config, dense_model.weights(0))
    rewrite(
        tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    )
    assert equal(load_checkpoint(tmp_path)[1], dense_model.weights(0))


def test_no_half_written_file_is_left_behind(saved):
    assert sorted(path.name for path in saved.iterdir()) == ["config.json", "model.safetensors"]


def test_a_folder_without_weights_is_named(saved):
    (saved / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors nor"):
        load_checkpoint(saved)


@pytest.mark.parametrize("keep", [0, 4, 40, 5000, -1])
def test_a_truncated_file_is_named(saved, keep):
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged or truncated") as got:
        load_checkpoint(saved)
    assert "\n" not in str(got.value)


def test_a_file_with_a_broken_header_is_named(saved):
    file = saved / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[8:40] = b"\xff" * 32
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        load_checkpoint(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"tensor model\.norm\.weight is missing"),
        (
            lambda t: t.pop("model.layers.2.mlp.experts.5.up_proj.weight"),
            r"experts\.5\.up_proj\.weight is missing",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(7)}),
            r"model\.norm\.weight has shape \(7,\); config\.json asks for \(48,\)",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int64)}),
            r"model\.norm\.weight is torch\.int64",
        ),
        (
            lambda t: t["model.norm.weight"].fill_(float("nan")),
            r"model\.norm\.weight holds NaN or infinity",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(48)}),
            r"q_proj\.bias has no place in this model",
        ),
    ],
)
def test_a_tensor_that_is_wrong_is_named_with_its_file(saved, change, message):
    rewrite(saved, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(saved)
    assert "model.safetensors" in str(caught.value)


def test_a_number_too_large_for_the_dtype_is_named(dense_model, tmp_path):
    weights = init_random(dense_model.config, 0, torch.float32)
    weights["model.norm.weight"][0] = 1e6
    save_checkpoint(tmp_path, dense_model.config, weights)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight .* as torch\.float16"):
        load_checkpoint(tmp_path, torch.float16)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is not a safetensors index"),
        ("{}", "is not a safetensors index"),
        ('{"weight_map": []}', "is not a safetensors index"),
        ('{"weight_map": {"a": "../other.safetensors"}}', "is not a file name"),
        ('{"weight_map": {"a": "gone.safetensors"}}', r"gone\.safetensors is missing"),
        ('{"weight_map": {"a": "model.safetensors"}}', "tensor a of the index is not in this file"),
    ],
)
def test_an_index_that_is_wrong_is_named(saved, index, message):
    (saved / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(saved)


def test_an_unsupported_dtype_is_refused(saved):
    with pytest.raises(CheckpointError, match=r"dtype torch\.float64"):
        load_checkpoint(saved, torch.float64)


def test_weights_of_another_model_are_not_saved(moe_model, tmp_path):
    wrong = replace(moe_model.config, layers=4)
    with pytest.raises(CheckpointError, match=r"model\.layers\.3.* is missing"):
        save_checkpoint(tmp_path, wrong, moe_model.weights(0))
    extra = moe_model.weights(0) | {"more": torch.ones(1)}
    with pytest.raises(CheckpointError, match="tensor more is not part of this model"):
        save_checkpoint(tmp_path, moe_model.config, extra)
    mixed = moe_model.weights(0) | {"model.norm.weight": torch.ones(48)}
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is torch\.float32"):
        save_checkpoint(tmp_path, moe_model.config, mixed)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(dense_model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write the checkpoint to"):
        save_checkpoint(tmp_path / "file", dense_model.config, dense_model.weights(0))


def test_the_index_lists_every_tensor_and_the_total_size(dense_model, tmp_path):
    save_checkpoint(tmp_path, dense_model.config, dense_model.weights(0), max_shard_bytes=10_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    size = sum(tensor.numel() * 2 for tensor in dense_model.weights(0).values())
    assert index["metadata"]["total_size"] == size
    assert "model.layers.1.self_attn.k_proj.weight" in index["weight_map"]
