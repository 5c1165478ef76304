"""What the kernel tests share: data that exposes a changed order of reduction; threads."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def _wide(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    values = values * torch.exp2(torch.randint(-6, 7, shape, generator=generator).float())
    if shape and shape[-1] > 1:
        half = shape[-1] // 2
        order = torch.randperm(half, generator=generator)
        noise = 1 + torch.randn((*shape[:-1], half), generator=generator) * 1e-3
        values[..., half : 2 * half] = -values[..., :half][..., order] * noise
    return values.to(dtype)


@pytest.fixture(scope="session")
def wide() -> Callable[..., torch.Tensor]:
    """wide(seed, *shape, dtype=...): signed, many magnitudes, and nearly cancelling along a row."""
    return _wide


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="session")
def threads() -> Callable[[int], contextlib.AbstractContextManager[None]]:
    """threads(n): a scope in which torch, and therefore the kernels, use n threads."""
    return _threads


def _error(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm().clamp_min(1e-300))


@pytest.fixture(scope="session")
def error() -> Callable[[torch.Tensor, torch.Tensor], float]:
    """error(value, exact): the norm of the difference from a float64 tensor over its norm."""
    return _error
