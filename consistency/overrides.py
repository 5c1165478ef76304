"""`batch_invariant`: aten operators run the kernels of the contract, or raise.

The operators are replaced in torch's dispatcher (torch.library), under the CPU key and above it
under the autograd key. So a backward that runs after the context has ended is still the kernels',
inference mode and backward threads are covered, and a call costs no Python where nothing is
replaced. A TorchDispatchMode would see every operator, but below autograd: the gradients would be
torch's whenever `backward` ran outside the context. The replacement holds for the whole process
while any context is open. CUDA tensors go to the Triton kernels or raise.

Compiled functions would not meet the dispatcher at run time, so while a context is open
torch.compile runs everything eagerly (torch.compiler.set_stance). A context that is entered inside
a compiled function comes too late for that; compiling a replaced operator then raises.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from consistency.errors import InvalidInputError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["batch_invariant", "disable", "enable"]

_DEVICES = ("CPU", "CUDA")


class _Overrides:
    """The one set of replacements that a process can have, and how many contexts hold it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._tp_invariant = False
        self._undo = contextlib.ExitStack()

    def acquire(self, tp_invariant: bool) -> None:
        with self._lock:
            if self._depth and tp_invariant != self._tp_invariant:
                raise InvalidInputError(
                    f"batch_invariant is already on with tp_invariant={self._tp_invariant}: a "
                    "nested context must have the same"
                )
            if not self._depth:
                with contextlib.ExitStack() as undo:
                    _replace(undo, tp_invariant)
                    self._undo = undo.pop_all()
                self._tp_invariant = tp_invariant
            self._depth += 1

    def release(self) -> None:
        with self._lock:
            if not self._depth:
                raise InvalidInputError("batch_invariant is not on: call enable first")
            self._depth -= 1
            if not self._depth:
                self._undo.close()

    @property
    def depth(self) -> int:
        return self._depth


def _replace(undo: contextlib.ExitStack, tp_invariant: bool) -> None:
    from consistency.kernels.aten import Operators

    originals = _native_kernels()

    def native(name: str, tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        kernel, keys = originals[name, tensor.device.type.upper()]
        return kernel.call_boxed(keys, tensor, *arguments, **options)

    table = Operators(tp_invariant=tp_invariant, native=native).table()
    library = torch.library.Library("aten", "IMPL")
    undo.callback(library._destroy)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name, function in table.items():
            for device in _DEVICES:
                library.impl(name, _without_gradients(function), device)
                library.impl(name, _not_traced(name, function), f"Autograd{device}")
    stance = torch.compiler.set_stance("force_eager")
    undo.callback(stance.__exit__, None, None, None)


def _native_kernels() -> dict[tuple[str, str], Any]:
    """(operator, device) -> torch's own kernel and the keys to call it with, for exact sums."""
    found = {}
    for device in _DEVICES:
        if device == "CUDA" and not torch.cuda.is_available():
            continue
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device))
        for name in ("mm", "mv", "dot", "addmm", "bmm", "baddbmm", "sum.dim_IntList"):
            found[name, device] = torch.library.get_kernel(f"aten::{name}", device), keys
    return found


def _without_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """Below the autograd key, autograd has already been dealt with, or is off."""

    def below_autograd(*arguments: Any, **options: Any) -> Any:
        with torch.no_grad():
            return function(*arguments, **options)

    return below_autograd


def _not_traced(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A compiler that traces the operator would generate code of its own for it: refuse."""

    def above_autograd(*arguments: Any, **options: Any) -> Any:
        if any(isinstance(argument, FakeTensor) for argument in arguments):
            raise UnsupportedError(
                f"aten::{name} is being compiled while batch_invariant is on: enter the context "
                "outside of the compiled function, which then runs eagerly"
            )
        return function(*arguments, **options)

    return above_autograd


_overrides = _Overrides()


@contextlib.contextmanager
def batch_invariant(*, tp_invariant: bool = False) -> Iterator[None]:
    """A scope in which torch's operators keep the numerics contract.

    A row of a result depends on that row, the weights and the contract alone, forward and backward.
    Replaced: mm, mv, dot, addmm, addmv, bmm, baddbmm, linear, softmax, log_softmax, sum, mean,
    rms_norm, layer_norm, scaled_dot_product_attention, and what is made of them (matmul, einsum,
    nn.Linear, ...), with their out= and dtype variants. Operators of which torch's own kernel may
    depend on the batch and for which there is no kernel (`kernels.aten.REFUSED`) raise. Other
    operators are torch's: element by element, they have no order.

    Contexts nest; the last exit restores torch, also after an exception. The scope is the whole
    process, all threads. It also decorates functions.

    Args:
        tp_invariant: cut the reductions of matrix products into chunks, so that tensor-parallel
            ranks compute subtrees; the same in nested contexts.

    Raises:
        InvalidInputError: a nested context with another `tp_invariant`.
        UnsupportedError: inside the scope, from an operator that cannot be honoured; the message
            names the operator and the argument.
    """
    enable(tp_invariant=tp_invariant)
    try:
        yield
    finally:
        disable()


def enable(*, tp_invariant: bool = False) -> None:
    """Enters `batch_invariant` without a scope; each call needs one `disable`."""
    _uncompiled(_overrides.acquire, tp_invariant)


def disable() -> None:
    """Leaves what `enable` entered.

    Raises:
        InvalidInputError: batch_invariant is not on.
    """
    _uncompiled(_overrides.release)


def _uncompiled(function: Callable[..., None], *arguments: bool) -> None:
    """Calls the function outside of any graph.

    torch.compiler.disable is not a decorator here, because it imports the compiler.
    """
    outside: Any = torch.compiler.disable
    outside(function)(*arguments)
