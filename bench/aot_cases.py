"""The calls whose kernels `bench.aot` compiles: every operation, at shapes of current models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from consistency import kernels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HIDDEN, INTERMEDIATE, VOCABULARY = 4096, 12288, 151936
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Case:
    """A named call; its result is never looked at."""

    name: str
    call: Callable[[], object]


def _name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


def products() -> Iterator[Case]:
    """Dense products: every class of M, with and without chunks, forward and backward."""
    for dtype in (*HALVES, torch.float32):
        for rows in (1, 64, 256, 4096):
            for outputs, width in ((HIDDEN, HIDDEN), (1536, 576), (HIDDEN, 11008)):
                x = torch.empty(rows, width, dtype=dtype)
                weight = torch.empty(outputs, width, dtype=dtype)
                for whole in (False, True):
                    name = f"linear {_name(dtype)} {rows}x{width}x{outputs}"
                    yield Case(
                        f"{name}{' tp' if whole else ''}",
                        lambda x=x, w=weight, t=whole: kernels.linear(x, w, tp_invariant=t),
                    )
        yield Case(f"linear backward {_name(dtype)}", lambda d=dtype: _linear_backward(d))


def _linear_backward(dtype: torch.dtype) -> None:
    x = torch.empty(4096, HIDDEN, dtype=dtype, requires_grad=True)
    weight = torch.empty(1536, HIDDEN, dtype=dtype, requires_grad=True)
    bias = torch.empty(1536, dtype=dtype, requires_grad=True)
    y = kernels.linear(x, weight, bias, tp_invariant=True)
    torch.autograd.grad(y, (x, weight, bias), torch.empty_like(y))


def grouped_products() -> Iterator[Case]:
    """Products of a mixture of experts: forward, dx and dweight."""
    for dtype in (torch.bfloat16, torch.float32):
        for rows in (128, 16384):
            yield Case(
                f"grouped_linear {_name(dtype)} {rows} rows",
                lambda d=dtype, r=rows: _grouped(d, r),
            )


def _grouped(dtype: torch.dtype, rows: int) -> None:
    experts, width = 16, 2048
    x = torch.empty(rows, width, dtype=dtype, requires_grad=True)
    weight = torch.empty(experts, 768, width, dtype=dtype, requires_grad=True)
    offsets = torch.arange(experts + 1) * (rows // experts)
    for whole in (False, True):
        y = kernels.grouped_linear(x, weight, offsets, tp_invariant=whole)
        torch.autograd.grad(y, (x, weight), torch.empty_like(y))


def _gradients(result: object, leaves: tuple[torch.Tensor, ...]) -> None:
    results = result if isinstance(result, tuple) else (result,)
    outputs = [y for y in results if isinstance(y, torch.Tensor) and y.requires_grad]
    torch.autograd.grad(outputs, leaves, [torch.empty_like(y) for y in outputs])


def row_operations() -> Iterator[Case]:
    """Row operations, forward and backward, at the width of a head and of a model."""
    for dtype in (*HALVES, torch.float32):
        for width in (128, HIDDEN):
            shape = f"{_name(dtype)} {width}"
            x = torch.empty(64, width, dtype=dtype, requires_grad=True)
            weight = torch.empty(width, dtype=dtype, requires_grad=True)
            for name, call in _row_calls(x, weight).items():
                yield Case(f"{name} {shape}", call)


def _row_calls(x: torch.Tensor, weight: torch.Tensor) -> dict[str, Callable[[], object]]:
    width = x.shape[1]
    heads = x.view(8, 8, width)
    table = torch.empty(1024, width)
    positions = torch.arange(8)
    return {
        "rms_norm": lambda: _gradients(kernels.rms_norm(x, weight, 1e-6), (x, weight)),
        "softmax": lambda: _gradients(kernels.softmax(x), (x,)),
        "log_softmax": lambda: _gradients(kernels.log_softmax(x), (x,)),
        "silu_and_mul": lambda: _gradients(kernels.silu_and_mul(x), (x,)),
        "rotary": lambda: _gradients(kernels.rotary(heads, positions, table), (x,)),
        "embedding": lambda: _gradients(kernels.embedding(positions, x), (x,)),
    }


def all_cases() -> Iterator[Case]:
    yield from products()
    yield from grouped_products()
    yield from row_operations()
