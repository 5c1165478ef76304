"""Load and save checkpoints: safetensors with the names of transformers, sharded or not."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from integrations.errors import CheckpointError
from integrations.trainer.model.config import ModelConfig
from integrations.trainer.model.weights import (
    LM_HEAD,
    checkpoint_parts,
    tensor_shapes,
    validate_weights,
)

__all__ = ["CheckpointReader", "load_checkpoint", "save_checkpoint"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Buffers that old exporters wrote although they follow from the configuration.
_DERIVED_SUFFIXES = (".rotary_emb.inv_freq", ".self_attn.bias", ".self_attn.masked_bias")


def load_checkpoint(
    folder: str | Path, dtype: torch.dtype = torch.bfloat16
) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Read the configuration and the weights of a checkpoint folder.

    Experts may be stored one by one (``experts.3.gate_proj.weight``) or fused
    (``experts.gate_up_proj``, as ``[experts, 2 intermediate, hidden]``).

    Args:
        folder: holds ``config.json`` and ``model.safetensors`` or an index with its shards.
        dtype: of the returned tensors; bfloat16, float16 or float32.

    Raises:
        ModelConfigError: ``config.json`` is missing or describes another kind of model.
        CheckpointError: a file or tensor is missing, damaged, of the wrong shape, not finite, or
            unknown to the model; the message names the file and the tensor.
    """
    if dtype not in _DTYPES:
        raise CheckpointError(f"dtype {dtype} is not supported; use bfloat16, float16 or float32")
    config = ModelConfig.load(folder)
    parts = checkpoint_parts(config)
    weights: dict[str, torch.Tensor] = {}
    with ExitStack() as stack:
        reader = CheckpointReader(Path(folder), stack)
        for name, shape in tensor_shapes(config).items():
            target = torch.empty(shape, dtype=dtype)
            if name in reader:
                reader.read_into(name, target)
            else:
                for part in parts[name]:
                    reader.read_into(part.name, part.of(target))
            weights[name] = target
        reader.refuse_unread(ignore={LM_HEAD} if config.tie_word_embeddings else set())
    return config, weights


def save_checkpoint(
    folder: str | Path,
    config: ModelConfig,
    weights: Mapping[str, torch.Tensor],
    *,
    max_shard_bytes: int = 5 * 1024**3,
) -> None:
    """Write ``config.json`` and safetensors that :func:`load_checkpoint` and transformers read.

    Every file is written beside its final name, flushed to disk and then renamed, so a crash
    leaves no half-written file under a final name.

    Raises:
        CheckpointError: ``weights`` does not fit ``config``, or the folder cannot be written.
    """
    validate_weights(config, weights)
    folder = Path(folder)
    shards = _shards(config, weights, max_shard_bytes)
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, start=1):
            file = _SINGLE
            if len(shards) > 1:
                file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            temporary = folder / f".{file}.partial"
            save_file(shard, temporary, metadata={"format": "pt"})
            _publish(temporary, folder / file)
            weight_map |= dict.fromkeys(shard, file)
        if len(shards) > 1:
            total = sum(t.numel() * t.element_size() for shard in shards for t in shard.values())
            _write_json(
                folder / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map}
            )
        else:
            # A left-over index of an earlier, sharded save would win over the new file.
            (folder / _INDEX).unlink(missing_ok=True)
        _write_json(folder / "config.json", config.to_dict(dtype))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write the checkpoint to {folder}: {error}") from error


class CheckpointReader:
    """The tensors of a checkpoint folder.

    Args:
        folder: holds safetensors, with an index or without.
        stack: keeps the files open.

    Raises:
        CheckpointError: a file is missing or damaged.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._file_of: dict[str, Path] = {}
        self._handles: dict[Path, Any] = {}
        self._unread: set[str] = set()
        for path, expected in _files(folder):
            try:
                handle = stack.enter_context(safe_open(path, framework="pt"))
                held = set(handle.keys())
            except FileNotFoundError:
                raise CheckpointError(f"{path} is missing") from None
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path} is damaged or truncated ({error}); copy the checkpoint again"
                ) from error
            for name in expected if expected is not None else held:
                if name not in held:
                    raise CheckpointError(f"{path}: tensor {name} of the index is not in this file")
                self._file_of[name] = path
            self._handles[path] = handle
        self._unread = set(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read_into(self, name: str, target: torch.Tensor) -> None:
        """Copy tensor ``name`` to ``target``, converting the dtype."""
        self.read_box_into(name, tuple(target.shape), (0,) * target.dim(), target)
        self._unread.discard(name)

    def read_box_into(
        self, name: str, shape: tuple[int, ...], start: tuple[int, ...], target: torch.Tensor
    ) -> None:
        """Copy a box of tensor ``name``, reading no more than the box, and converting the dtype.

        Args:
            name: of the tensor, whose whole shape must be ``shape``.
            start: first index of the box along each dimension.
            target: of the shape of the box; leading dimensions of extent 1 may be missing.
        """
        path = self._file_of.get(name)
        if path is None:
            files = ", ".join(sorted(p.name for p in self._handles))
            raise CheckpointError(f"tensor {name} is missing from the checkpoint (read {files})")
        extent = (1,) * (len(shape) - target.dim()) + tuple(target.shape)
        try:
            held = self._handles[path].get_slice(name)
            if tuple(held.get_shape()) != shape:
                raise CheckpointError(
                    f"{path}: tensor {name} has shape {tuple(held.get_shape())}; "
                    f"config.json asks for {shape}"
                )
            tensor = held[tuple(slice(s, s + n) for s, n in zip(start, extent, strict=True))]
        except SafetensorError as error:
            raise CheckpointError(f"{path}: tensor {name} cannot be read: {error}") from error
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(
                f"{path}: tensor {name} is {tensor.dtype}, not 16- or 32-bit float"
            )
        target.copy_(tensor.view(target.shape))
        if not bool(torch.isfinite(target).all()):
            raise CheckpointError(f"{path}: tensor {name} holds NaN or infinity as {target.dtype}")

    def refuse_unread(self, ignore: set[str]) -> None:
        """An unread tensor (a bias, say) is a part of the model that would be left out."""
        for name in sorted(self._unread - ignore):
            if not name.endswith(_DERIVED_SUFFIXES):
                raise CheckpointError(
                    f"{self._file_of[name]}: tensor {name} has no place in this model; "
                    "config.json and the weights do not belong together"
                )


def _files(folder: Path) -> Iterator[tuple[Path, list[str] | None]]:
    """Each safetensors file and the tensors that the index expects there (None: all)."""
    index = folder / _INDEX
    if not index.exists():
        single = folder / _SINGLE
        if not single.exists():
            raise CheckpointError(f"{folder} holds neither {_SINGLE} nor {_INDEX}")
        yield single, None
        return
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        items = [(str(name), str(file)) for name, file in weight_map.items()]
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index: {error!r}") from error
    by_file: dict[str, list[str]] = {}
    for name, file in items:
        if Path(file).name != file:
            raise CheckpointError(f"{index}: shard {file!r} is not a file name in the same folder")
        by_file.setdefault(file, []).append(name)
    for file, names in sorted(by_file.items()):
        yield folder / file, names


def _shards(
    config: ModelConfig, weights: Mapping[str, torch.Tensor], limit: int
) -> list[dict[str, torch.Tensor]]:
    """Checkpoint tensors in dictionaries of at most ``limit`` bytes, or of one tensor."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, parts in checkpoint_parts(config).items():
        for part in parts:
            tensor = part.of(weights[name].detach()).contiguous()
            bytes_ = tensor.numel() * tensor.element_size()
            if shards[-1] and size + bytes_ > limit:
                shards.append({})
                size = 0
            shards[-1][part.name] = tensor
            size += bytes_
    return shards


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    _publish(temporary, path)


def _publish(temporary: Path, path: Path) -> None:
    """Flush a finished temporary file to disk and give it its name."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
