"""Which implementation of the contract a call runs: C++ for CPU tensors, Triton for CUDA tensors.

The choice is made by the device of the tensors alone. Triton is imported when the first CUDA tensor
arrives, so that the CPU kernels need torch alone. `interpreted` sends CPU tensors to the Triton
kernels too, for tests: Triton's interpreter must be on (``TRITON_INTERPRET=1`` before Triton is
imported).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from consistency.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

P = ParamSpec("P")
R = TypeVar("R")

_interpreted: ContextVar[bool] = ContextVar("consistency_kernels_interpreted", default=False)
_unread: ContextVar[bool] = ContextVar("consistency_kernels_unread", default=False)


def on_triton(tensor: torch.Tensor) -> bool:
    """Whether a kernel that reads this tensor is the Triton one."""
    return not tensor.is_cpu or _interpreted.get()


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """A scope in which CPU tensors run the Triton kernels: the interpreter's, or a recorder's.

    Re-entrant, exception-safe, and confined to the context (thread or task) that entered it.
    """
    token = _interpreted.set(True)
    try:
        yield
    finally:
        _interpreted.reset(token)


@contextlib.contextmanager
def values_unread() -> Iterator[None]:
    """A scope in which tensors hold nothing yet: checks of shapes are done, of values are not."""
    token = _unread.set(True)
    try:
        yield
    finally:
        _unread.reset(token)


def values_readable(tensor: torch.Tensor) -> bool:
    """Whether the host may read a tensor's values now: not while a CUDA graph is captured.

    A check of values (ids, offsets, positions) waits for the device. A captured call repeats what a
    call before the capture has checked; the kernels keep such a call inside its tensors.
    """
    if _unread.get():
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def triton_kernels(name: str) -> Any:
    """The module `consistency.kernels.triton.<name>`, imported on first use.

    Raises:
        UnsupportedError: Triton is not installed.
    """
    return _load(name)


@functools.cache
def _load(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"consistency.kernels.triton.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise UnsupportedError(
            "tensors on a GPU need the Triton kernels, and Triton is not installed: "
            "pip install 'triton>=3.5,<3.10', or move the tensors to the CPU"
        ) from error


def one_device(function: Callable[P, R]) -> Callable[P, R]:
    """Refuses calls whose tensors are not all dense and on one CPU, CUDA or HIP device.

    Raises:
        UnsupportedError: in the wrapped function: another device or layout, or two devices.
    """

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for value in args:
            if isinstance(value, torch.Tensor) and not _plain_cpu(value):
                break
            if isinstance(value, list | tuple):
                break
        else:
            for value in kwargs.values():
                if isinstance(value, torch.Tensor) and not _plain_cpu(value):
                    break
            else:
                return function(*args, **kwargs)
        _require_one_device(inspect.signature(function).bind_partial(*args, **kwargs).arguments)
        return function(*args, **kwargs)

    return checked


def _plain_cpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.layout is torch.strided


def _require_one_device(arguments: dict[str, Any]) -> None:
    named = []
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            named.append((name, value))
        elif isinstance(value, list | tuple):
            items = enumerate(value)
            named += [(f"{name}[{i}]", item) for i, item in items if isinstance(item, torch.Tensor)]
    for name, tensor in named:
        if tensor.device.type not in ("cpu", "cuda"):
            raise UnsupportedError(
                f"{name} is on {tensor.device}; kernels exist for the CPU and for CUDA or HIP "
                "devices: move it there"
            )
        if tensor.layout is not torch.strided:
            raise UnsupportedError(
                f"{name} has layout {tensor.layout}: convert it with .to_dense()"
            )
        first, other = named[0]
        if tensor.device != other.device:
            raise UnsupportedError(
                f"{name} is on {tensor.device}, {first} on {other.device}: move them to one device"
            )
