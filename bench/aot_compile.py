"""Compiles recorded kernel launches for a GPU that is not here, and reads what the compiler made.

NVIDIA: registers and stack from ``cuobjdump -res-usage`` of the wheel, the matrix instruction from
the PTX. AMD: the figures that the assembler notes in the code object's metadata.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from consistency.errors import ConsistencyError
from consistency.kernels.triton.launch import Target

if TYPE_CHECKING:
    from consistency.kernels.triton.launch import Launch

TARGETS = {
    "sm_80": Target("cuda", 80, 108),
    "sm_90": Target("cuda", 90, 132),
    "sm_100": Target("cuda", 100, 148),
    "gfx942": Target("hip", "gfx942", 304),
}

_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}

# The instruction that a product of 16-bit operands must get, the best that the target has.
_WANTED = {"sm_80": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "v_mfma"}
_PATTERNS = {
    "tcgen05": r"tcgen05\.mma",
    "wgmma": r"wgmma\.mma_async",
    "mma.sync": r"mma\.sync",
    "v_mfma": r"v_mfma",
}


class CompilerOutputError(ConsistencyError, RuntimeError):
    """A tool printed something that this module does not understand."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the compiler made of one kernel.

    Args:
        case: the operation and shape that launched it.
        kernel: the function's name.
        target: sm_80, sm_90, sm_100 or gfx942.
        warps: warps of a program.
        registers: per thread; on AMD the vector registers, accumulators included.
        shared_bytes: of a program.
        spill_bytes: of a thread.
        instruction: the matrix instruction, or "" where the kernel has none.
        wanted: the matrix instruction that it must have, or "".
    """

    case: str
    kernel: str
    target: str
    warps: int
    registers: int
    shared_bytes: int
    spill_bytes: int
    instruction: str
    wanted: str

    @property
    def good(self) -> bool:
        return self.spill_bytes == 0 and self.instruction == self.wanted

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"good": self.good}


def compile_launch(case: str, launch: Launch, target: str) -> Compiled:
    """Compiles one recorded launch for a target of `TARGETS`."""
    gpu = TARGETS[target]
    backend = GPUTarget(gpu.backend, gpu.arch, 64 if gpu.backend == "hip" else 32)
    source = _source(launch)
    options = dict(launch.options)
    compiled = triton.compile(source, target=backend, options=options)
    wanted = ""
    product = launch.constants.get("PRODUCT")
    # AMD's matrix units multiply true fp32 too; NVIDIA's do not.
    if product in (tl.bfloat16, tl.float16) or (product == tl.float32 and gpu.backend == "hip"):
        wanted = _WANTED[target]
    text = compiled.asm["ptx" if gpu.backend == "cuda" else "amdgcn"]
    registers, spills = (
        _nvidia_resources(compiled.asm["cubin"]) if gpu.backend == "cuda" else _amd_resources(text)
    )
    found = next((name for name, pattern in _PATTERNS.items() if re.search(pattern, text)), "")
    return Compiled(
        case=case,
        kernel=launch.kernel.__name__,
        target=target,
        warps=launch.options["num_warps"],
        registers=registers,
        shared_bytes=compiled.metadata.shared,
        spill_bytes=spills,
        instruction=found,
        wanted=wanted,
    )


def launch_key(launch: Launch) -> str:
    """Equal for two launches that compile to the same code."""
    source = _source(launch)
    return f"{source.hash()} {sorted(launch.options.items())}"


def _source(launch: Launch) -> Any:
    kernel = launch.kernel
    signature, constants, attributes = {}, {}, {}
    values = dict(zip(kernel.arg_names, launch.arguments, strict=False)) | launch.constants
    for place, parameter in enumerate(kernel.params):
        name, value = parameter.name, values[parameter.name]
        specialised = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (specialised and _is_one(value)):
            signature[name] = "constexpr"
            constants[(place,)] = value
            continue
        signature[name] = _type(value)
        aligned = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if specialised and isinstance(aligned, int) and aligned % 16 == 0:
            attributes[(place,)] = [["tt.divisibility", 16]]
    return triton.compiler.ASTSource(kernel, signature, constants, attributes)


def _is_one(value: Any) -> bool:
    return type(value) is int and value == 1


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


def _nvidia_resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack and local memory) per thread."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", done.stdout + done.stderr)
    if found is None:
        raise CompilerOutputError(f"cuobjdump printed no resource usage: {done.stdout!r}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def _amd_resources(text: str) -> tuple[int, int]:
    def metadata(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", text)
        if found is None:
            raise CompilerOutputError(f"the AMD assembly has no .{name} in its metadata")
        return int(found.group(1))

    spilled = 4 * (metadata("vgpr_spill_count") + metadata("sgpr_spill_count"))
    return metadata("vgpr_count"), max(spilled, metadata("private_segment_fixed_size"))
