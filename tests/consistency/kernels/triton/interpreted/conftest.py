"""Sends the CPU tensors of every test in this folder to the Triton kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from consistency.kernels.triton import interpreted

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def in_triton() -> Iterator[None]:
    with interpreted():
        yield
