"""How every Triton kernel is launched: compiler options explicit, the target known.

The options that can move a bit are set here and nowhere else: ``enable_fp_fusion`` is off, so a
product is rounded before it is added unless the kernel writes `tl.fma` or `tl.dot`; on AMD the
matrix instruction has 16 rows. `record` collects launches instead of running them, which is how
`bench.aot` compiles, without a GPU, exactly what a GPU would run.
"""

from __future__ import annotations

import contextlib
import functools
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from triton import knobs

from consistency.errors import UnsupportedError
from consistency.kernels._dispatch import values_unread

if TYPE_CHECKING:
    from collections.abc import Iterator

# Programs of a persistent kernel in the interpreter: few, odd, more than one.
_INTERPRETED_PROGRAMS = 3


@dataclass(frozen=True, slots=True)
class Target:
    """What a kernel is compiled for.

    Args:
        backend: "cuda", "hip" or "interpreter".
        arch: the compute capability times 10 on CUDA (90), the gfx name on HIP, "" elsewhere.
        processors: multiprocessors, the number of programs of a persistent kernel.
    """

    backend: str
    arch: int | str
    processors: int

    @property
    def interpreted(self) -> bool:
        return self.backend == "interpreter"

    @property
    def matrix_rows(self) -> int:
        """The fewest rows of a tile that gets the same matrix instruction as every larger tile."""
        if self.backend == "cuda" and isinstance(self.arch, int) and self.arch >= 90:
            return 64
        return 16


@dataclass(frozen=True, slots=True)
class Launch:
    """One recorded launch: all that is needed to compile it."""

    kernel: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, Any]


@dataclass(slots=True)
class Recording:
    """The launches of a `record` scope."""

    target: Target
    launches: list[Launch] = field(default_factory=list)


_recording: ContextVar[Recording | None] = ContextVar("consistency_recording", default=None)


@contextlib.contextmanager
def record(target: Target) -> Iterator[Recording]:
    """A scope in which launches for `target` are collected and nothing runs.

    Outputs stay uninitialised, so the scope serves compilation alone.
    """
    recording = Recording(target)
    token = _recording.set(recording)
    try:
        with values_unread():
            yield recording
    finally:
        _recording.reset(token)


def target_of(tensor: torch.Tensor) -> Target:
    """The target of kernels that read this tensor.

    Raises:
        UnsupportedError: a CPU tensor while Triton's interpreter is off.
    """
    current = _recording.get()
    if current is not None:
        return current.target
    if tensor.is_cuda:
        return _device_target(tensor.device.index)
    if not knobs.runtime.interpret:
        raise UnsupportedError(
            "CPU tensors reach the Triton kernels only in Triton's interpreter: set "
            "TRITON_INTERPRET=1 before Triton is imported, or leave interpreted()"
        )
    return Target("interpreter", "", _INTERPRETED_PROGRAMS)


@functools.cache
def _device_target(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    processors = properties.multi_processor_count
    if torch.version.hip is not None:
        return Target("hip", properties.gcnArchName.partition(":")[0], processors)
    return Target("cuda", properties.major * 10 + properties.minor, processors)


def launch(
    kernel: Any,
    programs: int,
    *arguments: Any,
    on: torch.Tensor,
    warps: int = 4,
    stages: int = 1,
    **constants: Any,
) -> None:
    """Runs `kernel` as `programs` programs of a one-dimensional grid; no programs, no launch.

    Args:
        kernel: a `triton.jit` function.
        programs: the size of the grid; one dimension, because the others end at 65,535.
        arguments: the kernel's tensors and numbers, in order.
        on: a tensor on the device to run on.
        warps: warps of a program.
        stages: depth of the software pipeline; it moves no bit.
        constants: the kernel's compile-time constants.
    """
    if programs == 0:
        return
    target = target_of(on)
    options: dict[str, Any] = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
    if target.backend == "hip":
        options |= {"matrix_instr_nonkdim": 16, "num_stages": min(stages, 2)}
    current = _recording.get()
    if current is not None:
        current.launches.append(Launch(kernel, arguments, constants, options))
        return
    with torch.cuda.device(on.device) if on.is_cuda else contextlib.nullcontext():
        kernel[(programs,)](*arguments, **constants, **options)


def power_of_two(value: int) -> int:
    """The smallest power of two that is not below `value`, at least 1."""
    return 1 << max(0, value - 1).bit_length()


def blocks_of(value: int, size: int) -> int:
    """How many blocks of `size` cover `value`."""
    return -(-value // size)
