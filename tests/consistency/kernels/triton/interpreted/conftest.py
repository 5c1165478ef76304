"""Sends the CPU tensors of every test in this folder to the Triton kernels; seeds its data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from consistency.kernels.triton import interpreted

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def in_triton() -> Iterator[None]:
    torch.manual_seed(0)
    with interpreted():
        yield
