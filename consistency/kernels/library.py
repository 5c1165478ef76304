"""Loads the compiled CPU kernels and declares their C functions.

One shared library exists per instruction set level; all of them compute the same bits, so the best
one that this processor can run is loaded. An op module declares the function it calls and nothing
else::

    _softmax = Kernel("lockstep_softmax", POINTER, INT64, POINTER, INT32, INT32)
    ...
    _softmax(x.data_ptr(), rows, out.data_ptr(), dtype_code(x.dtype), thread_count())

Every C function returns an int32 status (`0` done, `1` out of memory) and takes plain pointers,
strides in elements, dtype codes and a thread count. ctypes releases the GIL during the call.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch  # loaded first: the kernels then share the OpenMP threads that torch uses

from consistency.errors import KernelLibraryError

POINTER = ctypes.c_void_p
INT32 = ctypes.c_int32
INT64 = ctypes.c_int64
FLOAT = ctypes.c_float

# From the best to the one that runs everywhere; the index from the end is the processor's level.
VARIANTS = ("v4", "v3", "baseline")

# Mirrors kRevision in cpu/revision.cpp. It changes when the arguments of any C function change.
REVISION = 5

_BUILD_HINT = "build the kernels with `pip install -e .` or `python setup.py build_ext --inplace`"


def variant_path(variant: str) -> Path:
    """Where the shared library of one variant lies."""
    return Path(__file__).with_name(f"_kernels_{variant}.so")


@functools.cache
def load_variant(variant: str) -> ctypes.CDLL:
    """The shared library of one variant.

    Raises:
        KernelLibraryError: the library was not built, does not load, or belongs to another revision
            of this package.
    """
    path = variant_path(variant)
    if not path.exists():
        raise KernelLibraryError(f"the CPU kernel library {path} does not exist: {_BUILD_HINT}")
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelLibraryError(f"cannot load {path}: {error}; {_BUILD_HINT}") from error
    revision = loaded.lockstep_revision() if hasattr(loaded, "lockstep_revision") else 0
    if revision != REVISION:
        raise KernelLibraryError(
            f"{path} has kernel revision {revision}, this package needs {REVISION}: {_BUILD_HINT}"
        )
    return loaded


def runnable_variants() -> tuple[str, ...]:
    """The variants that are built and that this processor can run, the best one first."""
    level = load_variant("baseline").lockstep_processor_level()
    possible = VARIANTS[len(VARIANTS) - 1 - level :]
    return tuple(variant for variant in possible if variant_path(variant).exists())


@functools.cache
def library() -> ctypes.CDLL:
    """The best shared library that this processor can run."""
    return load_variant(runnable_variants()[0])


class Kernel:
    """One C function of the library: looked up on first use, its status checked on every call.

    Args:
        name: the exported symbol.
        argument_types: ctypes types of its arguments, in order.
        variant: the library to take it from; by default the best that this processor can run.
    """

    def __init__(self, name: str, *argument_types: Any, variant: str | None = None) -> None:
        self.name = name
        self.argument_types = argument_types
        self.variant = variant

    @functools.cached_property
    def _function(self) -> Any:
        source = library() if self.variant is None else load_variant(self.variant)
        function = getattr(source, self.name, None)
        if function is None:
            raise KernelLibraryError(f"the kernel library has no {self.name}: {_BUILD_HINT}")
        function.argtypes = self.argument_types
        function.restype = INT32
        return function

    def __call__(self, *arguments: Any) -> None:
        if self._function(*arguments):
            raise MemoryError(f"{self.name}: not enough memory for its scratch buffers")

    def on(self, variant: str) -> Kernel:
        """The same function of another variant, to compare their bits."""
        return Kernel(self.name, *self.argument_types, variant=variant)


def thread_count() -> int:
    """The number of threads that a kernel may use: torch's setting. It never changes a result."""
    return torch.get_num_threads()
