"""`patch`: one call that routes a model of somebody else's library to the kernels of the contract.

This package knows no such library. Whoever supports one registers a module under the entry-point
group `lockstep.patches`, by the name of the library's top-level package; it has two functions::

    patch(model, *, contract=None, operations=None) -> None
    unpatch(model) -> None

`lockstep-rl` itself registers `transformers`. Nothing of the group is imported before a model of
that library is patched, so `import consistency` still needs torch alone.
"""

from __future__ import annotations

from collections.abc import Collection
from importlib.metadata import entry_points
from typing import Any, Final

from consistency.contract import NumericsContract
from consistency.errors import UnsupportedError

ENTRY_POINTS: Final = "lockstep.patches"
"""The group under which a library's patches are found."""


def patch(
    model: Any,
    *,
    contract: NumericsContract | None = None,
    operations: Collection[str] | None = None,
) -> Any:
    """Routes the operations of `model` to the kernels of the contract, in place.

    Args:
        model: a model of a supported library, for example ``Qwen3ForCausalLM`` of transformers.
        contract: the contract to keep; by default the one of this device and the model's dtype.
        operations: names of the operations to route, to find out what one of them changes; by
            default all of them, without which nothing is promised.

    Returns:
        The same object.

    Raises:
        UnsupportedError: a model, layer, device, dtype or option that cannot be honoured. The model
            is then as it was.
    """
    _support_of(model).patch(model, contract=contract, operations=operations)
    return model


def unpatch(model: Any) -> Any:
    """Restores what `patch` replaced: the very objects, so the very bits.

    Returns:
        The same object.

    Raises:
        UnsupportedError: the model is not patched.
    """
    _support_of(model).unpatch(model)
    return model


def _support_of(model: Any) -> Any:
    """The module that can patch the library which `model` comes from."""
    libraries = [kind.__module__.partition(".")[0] for kind in type(model).__mro__]
    found = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    for library in libraries:
        if library in found:
            return found[library].load()
    known = ", ".join(sorted(found)) or "no library; is lockstep-rl installed?"
    raise UnsupportedError(
        f"model is a {type(model).__module__}.{type(model).__qualname__}: patches exist for {known}"
    )
