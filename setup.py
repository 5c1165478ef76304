"""Builds the CPU kernels: one plain shared library per x86-64 level, loaded by ctypes at run time.

The libraries link neither Python nor torch, so one wheel serves every supported Python and torch.
All variants compute the same bits (see simd.hpp); they differ in speed alone. Everything else about
the distribution is declared in pyproject.toml.
"""

from __future__ import annotations

import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCE_FOLDER = Path("consistency/kernels/cpu")

# -ffp-contract=off: every fusion is explicit, so that all variants round at the same places.
# -fno-math-errno and -fno-trapping-math change no result; they permit vectorisation.
COMPILE_FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-fopenmp",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
    # False alarms inside the AVX-512 headers of GCC 12.
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
]
V3_FLAGS = ["-mavx2", "-mfma", "-mf16c", "-mbmi2"]
V4_FLAGS = [*V3_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]


def variants() -> dict[str, list[str]]:
    """The libraries to build on this machine: name -> extra compiler flags."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        return {"baseline": [], "v3": V3_FLAGS, "v4": V4_FLAGS}
    return {"baseline": []}


def extensions() -> list[Extension]:
    sources = sorted(str(path) for path in SOURCE_FOLDER.glob("*.cpp"))
    headers = sorted(str(path) for path in SOURCE_FOLDER.glob("*.hpp"))
    return [
        Extension(
            f"consistency.kernels._kernels_{name}",
            sources=sources,
            depends=headers,
            extra_compile_args=[*COMPILE_FLAGS, *flags],
            extra_link_args=["-fopenmp"],
            language="c++",
        )
        for name, flags in variants().items()
    ]


class BuildKernels(build_ext):
    """Compiles each source once per variant, in parallel, and only when it or a header changed."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def build_extensions(self) -> None:
        work = [(ext, source) for ext in self.extensions for source in ext.sources]
        with ThreadPoolExecutor(int(self.parallel or os.cpu_count() or 1)) as pool:
            objects = list(pool.map(lambda item: self._compile(*item), work))
        for extension in self.extensions:
            mine = [
                path for (owner, _), path in zip(work, objects, strict=True) if owner is extension
            ]
            target = Path(self.get_ext_fullpath(extension.name))
            target.parent.mkdir(parents=True, exist_ok=True)
            self.compiler.link_shared_object(
                mine,
                str(target),
                extra_postargs=extension.extra_link_args,
                target_lang="c++",
            )

    def _compile(self, extension: Extension, source: str) -> str:
        folder = Path(self.build_temp) / extension.name.rpartition("_")[2]
        target = folder / Path(source).with_suffix(".o")
        inputs = [source, *extension.depends, __file__]
        newest = max(Path(path).stat().st_mtime for path in inputs)
        if self.force or not target.exists() or target.stat().st_mtime <= newest:
            self.compiler.compile(
                [source], output_dir=str(folder), extra_postargs=extension.extra_compile_args
            )
        return str(target)


class PlatformWheel(bdist_wheel):
    """Tags the wheel for any Python 3 of this platform: the libraries use no Python ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
)
