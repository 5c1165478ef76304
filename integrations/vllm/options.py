"""`VllmOptions`: what the plugin is told, in vLLM's `additional_config` or in `lockstep.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import yaml

from integrations.errors import EngineConfigError

__all__ = ["FILE_NAME", "KEY", "OPERATIONS", "VllmOptions"]

KEY: Final = "lockstep"
"""The key of `additional_config`."""

FILE_NAME: Final = "lockstep.yaml"
"""Read from the working directory when `additional_config` has no `KEY`; its section `vllm`."""

OPERATIONS: Final = (
    "linear",
    "rms_norm",
    "silu_and_mul",
    "rotary",
    "attention",
    "router",
    "experts",
    "lm_head",
    "logprobs",
    "sampling",
)
"""What the plugin can route, one name per kind of operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """Options of the plugin.

    Args:
        tp_invariant: as in `NumericsContract`.
        operations: what to route to the contract; all of it, unless one operation's share of the
            drift is to be found out.
        record_routes: keep the expert ids of every token of an MoE model.

    Raises:
        EngineConfigError: a value of another type, or an operation that does not exist.
    """

    tp_invariant: bool = False
    operations: tuple[str, ...] = OPERATIONS
    record_routes: bool = True

    def __post_init__(self) -> None:
        for name in ("tp_invariant", "record_routes"):
            if type(getattr(self, name)) is not bool:
                raise EngineConfigError(
                    f"{KEY}.{name} is {getattr(self, name)!r}: use true or false"
                )
        for name in self.operations:
            if name not in OPERATIONS:
                raise EngineConfigError(
                    f"{KEY}.operations names {name!r}: use {', '.join(OPERATIONS)}"
                )

    @classmethod
    def of(cls, additional_config: Any) -> VllmOptions | None:
        """The options in `additional_config`; None if it does not mention the plugin.

        Raises:
            EngineConfigError: the entry is not a mapping, or has an unknown key or value.
        """
        if not isinstance(additional_config, Mapping) or KEY not in additional_config:
            return None
        return cls._of(additional_config[KEY], f"additional_config[{KEY!r}]")

    @classmethod
    def of_file(cls, folder: Path) -> VllmOptions | None:
        """The options in section `vllm` of `folder`/lockstep.yaml; None without file or section.

        Raises:
            EngineConfigError: the file cannot be read, or as in `of`.
        """
        path = folder / FILE_NAME
        if not path.exists():
            return None
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            reason = " ".join(str(error).split())
            raise EngineConfigError(f"{path} cannot be read: {reason}") from error
        if values is None or (isinstance(values, Mapping) and "vllm" not in values):
            return None
        if not isinstance(values, Mapping):
            raise EngineConfigError(f"{path} holds a {type(values).__name__}: use a mapping")
        return cls._of(values["vllm"], f"{path}, section vllm")

    @classmethod
    def _of(cls, values: Any, where: str) -> VllmOptions | None:
        if values is False or values is None:
            return None
        if values is True:
            return cls()
        if not isinstance(values, Mapping):
            raise EngineConfigError(f"{where} is {values!r}: use true, false or a mapping")
        known = [field.name for field in fields(cls)]
        for key in values:
            if key not in known:
                raise EngineConfigError(f"{where} has a key {key!r}: use {', '.join(known)}")
        given = dict(values)
        if "operations" in given:
            if not isinstance(given["operations"], list | tuple):
                raise EngineConfigError(f"{where}: operations must be a list of names")
            given["operations"] = tuple(given["operations"])
        return cls(**given)

    def to_mapping(self) -> dict[str, Any]:
        """What `of` reads under `KEY`; plain values, so that vLLM can hash and send them."""
        return {**asdict(self), "operations": list(self.operations)}
