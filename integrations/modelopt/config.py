"""Reads and writes Model Optimizer's quantisation configurations; imports nothing of it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.quant import BLOCK, BlockFormat, QuantSettings, ScaleRule

BACKEND = "lockstep"

_SCALE_BITS = (8, 0)
_FORMATS = {(2, 1): BlockFormat.MXFP4, (4, 3): BlockFormat.MXFP8}


def with_backend(
    config: Mapping[str, Any], *, scale_rule: str, source_dtype: str = "bfloat16"
) -> dict[str, Any]:
    """A copy of a configuration whose MX quantizers run on the codec.

    Args:
        config: as ``mtq.quantize`` takes it, with a list under ``quant_cfg``.
        scale_rule: "floor", "even", "rceil" or "ceil".
        source_dtype: what is quantised, see `QuantSettings`.

    Returns:
        The configuration with ``backend`` and ``backend_extra_args`` in every MXFP4 and MXFP8
        quantizer; other entries are untouched.

    Raises:
        InvalidInputError: an unknown scale rule, no ``quant_cfg`` list, or no MX quantizer in it.
    """
    changed = copy.deepcopy(dict(config))
    rules = {rule.value: rule for rule in ScaleRule}
    if scale_rule not in rules:
        raise InvalidInputError(f"scale_rule is {scale_rule!r}: use one of {', '.join(rules)}")
    found = 0
    for attributes in _quantizers(changed):
        kind = _format_of(attributes)
        if kind is None:
            continue
        settings = QuantSettings(
            scale_rule=rules[scale_rule], format=kind, source_dtype=source_dtype
        )
        attributes["backend"] = BACKEND
        attributes["backend_extra_args"] = settings.to_mapping()
        found += 1
    if not found:
        raise InvalidInputError(
            "the configuration has no MXFP4 or MXFP8 quantizer (num_bits (2, 1) or (4, 3) with "
            f"block_sizes {{-1: {BLOCK}, 'scale_bits': (8, 0)}}): nothing to run on this backend"
        )
    return changed


def settings_of(config: Mapping[str, Any]) -> dict[str, QuantSettings]:
    """The settings of every quantizer that runs on this backend, by its name pattern.

    Raises:
        InvalidInputError: no ``quant_cfg`` list, or settings that are not whole.
    """
    found = {}
    for entry in _entries(config):
        for attributes in _attributes(entry):
            if attributes.get("backend") == BACKEND:
                settings = QuantSettings.from_mapping(attributes.get("backend_extra_args") or {})
                found[str(entry.get("quantizer_name"))] = settings
    return found


def settings_of_quantizer(
    num_bits: Any, block_sizes: Any, extra_args: Mapping[str, Any]
) -> QuantSettings:
    """The settings of one live quantizer.

    Raises:
        UnsupportedError: its format is not an MX format, or contradicts its settings.
        InvalidInputError: settings that are not whole.
    """
    kind = _format_of({"num_bits": num_bits, "block_sizes": block_sizes})
    settings = QuantSettings.from_mapping(extra_args)
    if kind is not settings.format:
        raise UnsupportedError(
            f"a quantizer has num_bits {num_bits} and block_sizes {block_sizes}, but the settings "
            f"of its backend say {settings.format.value}: make the configuration with with_backend"
        )
    return settings


def _format_of(attributes: Mapping[str, Any]) -> BlockFormat | None:
    sizes = attributes.get("block_sizes")
    bits = attributes.get("num_bits")
    if not isinstance(sizes, Mapping) or not isinstance(bits, list | tuple):
        return None
    axis = sizes.get(-1, sizes.get("-1"))
    if axis != BLOCK or tuple(sizes.get("scale_bits") or ()) != _SCALE_BITS:
        return None
    return _FORMATS.get(tuple(bits))  # type: ignore[arg-type]


def _quantizers(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for entry in _entries(config):
        yield from _attributes(entry)


def _entries(config: Mapping[str, Any]) -> list[Any]:
    entries = config.get("quant_cfg")
    if not isinstance(entries, list):
        raise InvalidInputError(
            f"quant_cfg is a {type(entries).__name__}: this release reads the list form of "
            "nvidia-modelopt 0.47"
        )
    return entries


def _attributes(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    attributes = entry.get("cfg")
    if attributes is None:
        return []
    return attributes if isinstance(attributes, list) else [attributes]
