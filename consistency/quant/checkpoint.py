"""Reads checkpoints with packed weights, of any layout, matrix by matrix; and ordinary ones.

A reader opens nothing but safetensors headers until a matrix is asked for, so that a model larger
than memory can be compared with another. What it cannot tell for certain it refuses.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.quant.export import CONFIG_FILE, INDEX_FILE, SETTINGS_KEY, SINGLE_FILE
from consistency.quant.formats import BLOCK
from consistency.quant.layouts import CheckpointLayout, GateUp, matrices_of, matrix_of_deepseek
from consistency.quant.mxfp4 import PackedTensor
from consistency.quant.settings import QuantSettings

_GPT_OSS_BLOCKS = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)_blocks")
# Dtypes as safetensors headers name them.
_BYTES = ("U8",)
_COMPRESSED_WEIGHT_ARGS = {
    "num_bits": 4,
    "type": "float",
    "strategy": "group",
    "group_size": BLOCK,
    "symmetric": True,
}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a matrix is: its tensor, that of its scales, and its part of them."""

    tensor: str
    scales: str | None = None
    expert: int | None = None
    rows: slice | None = None
    transposed: bool = False

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        whole = tensor if self.expert is None else tensor[self.expert]
        whole = whole.t() if self.transposed else whole
        return whole if self.rows is None else whole[self.rows]


class CheckpointReader:
    """A checkpoint folder; use it in a ``with`` statement.

    Args:
        folder: holds ``config.json`` and ``model.safetensors`` or an index with its files.
        gate_up: order of the rows of a dense, stacked gate_up_proj. It is always "interleaved" in
            checkpoints of gpt_oss, whose dense experts transformers stores as [experts, in, out];
            they are read transposed.

    Raises:
        InvalidInputError: a file is missing or damaged, codes without scales, shapes or dtypes that
            do not belong together, or headers that name different quantisers.
        UnsupportedError: weights quantised in another way than the layouts that are known, or
            activations quantised as well (W4A8, W4A4): a trainer with bf16 activations computes
            something else than the engine will.
    """

    def __init__(self, folder: str | os.PathLike[str], *, gate_up: GateUp = "stacked") -> None:
        self.folder = Path(folder)
        self._stack = ExitStack()
        self._tensors: dict[str, Any] = {}
        self._recent: dict[str, torch.Tensor] = {}
        try:
            self.config: Mapping[str, Any] = _read_json(self.folder / CONFIG_FILE)
            self.layout: CheckpointLayout | None = layout_of(self.config, self.folder)
            self._transposed = self.config.get("model_type") == "gpt_oss"
            self.gate_up: GateUp = "interleaved" if self._transposed else gate_up
            self.settings: QuantSettings | None = self._open()
            self._packed, self._dense = self._places()
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def packed_names(self) -> tuple[str, ...]:
        """Names of the matrices that are stored as codes and scales."""
        return tuple(self._packed)

    @property
    def dense_names(self) -> tuple[str, ...]:
        """Names of all other tensors; stacked experts as their matrices."""
        return tuple(self._dense)

    def packed(self, name: str, settings: QuantSettings | None = None) -> PackedTensor:
        """A packed matrix [out, in].

        Args:
            name: one of `packed_names`.
            settings: the quantiser's, for a checkpoint that does not name it.

        Raises:
            InvalidInputError: no such matrix, or nobody says how it was quantised.
        """
        known = self.settings or settings
        if known is None:
            raise InvalidInputError(
                f"{self.folder} does not say how it was quantised: give the settings of the "
                "quantiser that wrote it (its scale rule)"
            )
        return PackedTensor(*self.codes_and_scales(name), known)

    def codes_and_scales(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 [out, in / 2] and uint8 [out, in / 32] of a packed matrix.

        Raises:
            InvalidInputError: no such matrix.
        """
        place = self._packed.get(name)
        if place is None or place.scales is None:
            raise InvalidInputError(f"{self.folder} has no packed matrix {name}")
        scales = place.of(self._tensor(place.scales)).view(torch.uint8)
        codes = place.of(self._tensor(place.tensor)).view(torch.uint8)
        return codes.reshape(scales.shape[0], -1), scales

    def dense(self, name: str) -> torch.Tensor:
        """A tensor that is not packed, in the dtype of the file.

        Raises:
            InvalidInputError: no such tensor.
        """
        place = self._dense.get(name)
        if place is None:
            raise InvalidInputError(f"{self.folder} has no dense tensor {name}")
        return place.of(self._tensor(place.tensor))

    def _open(self) -> QuantSettings | None:
        from safetensors import SafetensorError, safe_open

        found: dict[str, Path] = {}
        for path, expected in _files(self.folder):
            try:
                handle = self._stack.enter_context(safe_open(path, framework="pt"))
                names, header = list(handle.keys()), handle.metadata() or {}
            except FileNotFoundError:
                raise InvalidInputError(f"{path} is missing: copy the checkpoint again") from None
            except (SafetensorError, OSError) as error:
                raise InvalidInputError(
                    f"{path} is damaged or truncated ({error}): copy the checkpoint again"
                ) from error
            for name in expected if expected is not None else names:
                if name not in names:
                    raise InvalidInputError(f"{path} lacks {name}, which the index promises")
                self._tensors[name] = handle
            found.setdefault(header.get(SETTINGS_KEY, ""), path)
        if len(found) > 1:
            first, second = list(found.values())[:2]
            raise InvalidInputError(
                f"{first.name} and {second.name} name different quantisers: they are not of one "
                "checkpoint"
            )
        text = next(iter(found), "")
        if not text:
            return None
        try:
            return QuantSettings.from_mapping(json.loads(text))
        except (ValueError, AttributeError) as error:
            raise InvalidInputError(f"{self.folder}: header {SETTINGS_KEY}: {error}") from error

    def _places(self) -> tuple[dict[str, _Place], dict[str, _Place]]:
        packed: dict[str, _Place] = {}
        taken: set[str] = set()
        for name in self._tensors:
            for matrix, place in self._packed_places(name):
                packed[matrix] = place
                taken |= {place.tensor, place.scales or place.tensor}
        dense: dict[str, _Place] = {}
        for name in self._tensors:
            if name in taken:
                continue
            if _looks_packed(name, self._slice_dtype(name)):
                raise InvalidInputError(
                    f"{self.folder}: {name} looks like a part of a packed weight, but config.json "
                    f"says {self.layout.value if self.layout else 'nothing of quantisation'} and "
                    "its other part is not there"
                )
            shape = self._slice_shape(name)
            if len(shape) != 3 or ".experts." not in name:
                dense[name] = _Place(name)
                continue
            if self._transposed:
                shape = (shape[0], shape[2], shape[1])
            # Numbers stand in for rows: matrices_of says which belong to which matrix.
            numbers = torch.arange(shape[0] * shape[1]).view(*shape[:2], 1)
            for matrix, rows in matrices_of(name, numbers, self.gate_up):
                first, step = int(rows[0]), int(rows[1] - rows[0]) if len(rows) > 1 else 1
                start = first % shape[1]
                part = slice(start, start + step * (len(rows) - 1) + 1, step)
                expert = first // shape[1]
                dense[matrix] = _Place(name, None, expert, part, self._transposed)
        if self.layout is not None and not packed:
            raise InvalidInputError(
                f"{self.folder}: config.json says {self.layout.value}, but no tensor is packed"
            )
        return packed, dense

    def _packed_places(self, name: str) -> list[tuple[str, _Place]]:
        """The matrices in a tensor of codes; none if it is not one of this layout."""
        if self.layout is CheckpointLayout.COMPRESSED_TENSORS and name.endswith(".weight_packed"):
            stem = name.removesuffix("_packed")
            return [(stem, self._checked(name, f"{stem}_scale", _BYTES, _BYTES))]
        if self.layout is CheckpointLayout.DEEPSEEK_V4:
            matrix = matrix_of_deepseek(name)
            if matrix is None:
                return []
            scales = name.removesuffix(".weight") + ".scale"
            return [(matrix, self._checked(name, scales, ("I8", *_BYTES), ("F8_E8M0", *_BYTES)))]
        match = _GPT_OSS_BLOCKS.fullmatch(name)
        if self.layout is not CheckpointLayout.GPT_OSS or match is None:
            return []
        scales = name.removesuffix("_blocks") + "_scales"
        self._checked(name, scales, _BYTES, _BYTES)
        experts, prefix = self._slice_shape(name)[0], match[1]
        projections = (
            {"down_proj": None}
            if match[2] == "down_proj"
            else {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
        )
        return [
            (f"{prefix}.{expert}.{projection}.weight", _Place(name, scales, expert, rows))
            for expert in range(experts)
            for projection, rows in projections.items()
        ]

    def _checked(
        self,
        codes: str,
        scales: str,
        code_dtypes: tuple[str, ...],
        scale_dtypes: tuple[str, ...],
    ) -> _Place:
        if scales not in self._tensors:
            raise InvalidInputError(f"{self.folder}: {codes} has no {scales.rpartition('.')[2]}")
        for name, allowed in ((codes, code_dtypes), (scales, scale_dtypes)):
            dtype = self._slice_dtype(name)
            if dtype not in allowed:
                raise InvalidInputError(f"{self.folder}: {name} is {dtype}, not {allowed[0]}")
        has, needs = self._slice_shape(codes), self._slice_shape(scales)
        wanted = (*needs, BLOCK // 2)
        if self.layout is not CheckpointLayout.GPT_OSS:
            wanted = (*needs[:-1], needs[-1] * (BLOCK // 2))
        if has != wanted:
            raise InvalidInputError(
                f"{self.folder}: {codes} has shape {has}, but {scales} {needs} asks for {wanted}"
            )
        return _Place(codes, scales)

    def _tensor(self, name: str) -> torch.Tensor:
        # Consecutive matrices of stacked experts lie in the same tensors: codes and scales.
        if name not in self._recent:
            while len(self._recent) > 1:
                self._recent.pop(next(iter(self._recent)))
            self._recent[name] = self._tensors[name].get_tensor(name)
        return self._recent[name]

    def _slice_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].get_slice(name).get_shape())

    def _slice_dtype(self, name: str) -> str:
        return self._tensors[name].get_slice(name).get_dtype()


def layout_of(config: Mapping[str, Any], folder: Path) -> CheckpointLayout | None:
    """The layout that a ``config.json`` announces; None if nothing is quantised.

    Raises:
        UnsupportedError: another kind of quantisation, or one of activations too.
    """
    quantisation = config.get("quantization_config")
    if not quantisation:
        return None
    if not isinstance(quantisation, Mapping):
        raise InvalidInputError(f"{folder}: quantization_config is no object")
    method = quantisation.get("quant_method")
    if method == "mxfp4":
        return CheckpointLayout.GPT_OSS
    if method in ("fp8", "deepseek_v4_fp8"):
        experts = config.get("expert_dtype", quantisation.get("expert_dtype"))
        if experts != "fp4":
            raise UnsupportedError(
                f"{folder}: quant_method {method!r} with expert_dtype {experts!r}: only "
                "checkpoints whose experts are fp4 hold MXFP4 weights"
            )
        return CheckpointLayout.DEEPSEEK_V4
    if method == "compressed-tensors":
        _require_mxfp4_groups(quantisation, folder)
        return CheckpointLayout.COMPRESSED_TENSORS
    known = "mxfp4 (gpt-oss), compressed-tensors and fp8 with expert_dtype fp4 (DeepSeek-V4)"
    raise UnsupportedError(f"{folder}: quant_method {method!r} is not known; known are {known}")


def _require_mxfp4_groups(quantisation: Mapping[str, Any], folder: Path) -> None:
    groups = quantisation.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise InvalidInputError(f"{folder}: quantization_config has no config_groups")
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise InvalidInputError(f"{folder}: config group {name} says nothing of weights")
        for key, value in _COMPRESSED_WEIGHT_ARGS.items():
            if weights.get(key) != value:
                raise UnsupportedError(
                    f"{folder}: config group {name} has weights.{key} = {weights.get(key)!r}; "
                    f"MXFP4 has {value!r}"
                )
        if group.get("input_activations") is not None:
            raise UnsupportedError(
                f"{folder}: config group {name} quantises input_activations too; a trainer with "
                "bf16 activations does not compute what this engine will: export W4A16 "
                "(input_activations null)"
            )


def _looks_packed(name: str, dtype: str) -> bool:
    parts = (".weight_packed", ".weight_scale", "_proj_blocks", "_proj_scales")
    return name.endswith(parts) or dtype in ("U8", "I8")


def _files(folder: Path) -> list[tuple[Path, list[str] | None]]:
    """Each safetensors file and the tensors that the index expects there (None: all)."""
    index = folder / INDEX_FILE
    if not index.exists():
        single = folder / SINGLE_FILE
        if not single.exists():
            raise InvalidInputError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
        return [(single, None)]
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, Mapping):
        raise InvalidInputError(f"{index} has no weight_map")
    by_file: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise InvalidInputError(f"{index}: {file!r} is not a file name in the same folder")
        by_file.setdefault(file, []).append(name)
    return [(folder / file, names) for file, names in sorted(by_file.items())]


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidInputError(f"{path} is missing: a checkpoint folder needs it") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InvalidInputError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, Mapping):
        raise InvalidInputError(f"{path} holds no JSON object")
    return values
