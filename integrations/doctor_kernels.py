"""`lockstep doctor --kernels`: does every kernel keep its promise on this machine?

Data that cancels and spans many magnitudes goes through each operation, with one thread; then
subsets of its rows, alone and padded, at other positions, and with two threads. Every row must come
back with the same bits. Benign data would hide a changed order of reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from consistency import kernels

__all__ = ["KernelCheck", "as_mapping", "check_kernels", "show_kernels"]

ROWS = 48
SUBSETS = ((0,), (31,), (47, 3, 3), tuple(range(15)), tuple(range(7, 24)))
SHAPES = ((576, 1536), (1536, 577), (1000, 48))

Operation = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class KernelCheck:
    """One operation at one shape: `failures` names the ways in which a row's bits changed."""

    operation: str
    shape: str
    dtype: str
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether no way changed a bit."""
        return not self.failures


def check_kernels() -> tuple[KernelCheck, ...]:
    """Runs every operation; takes a few seconds. The thread count of torch is restored."""
    before = torch.get_num_threads()
    try:
        return tuple(
            KernelCheck(name, shape, str(x.dtype).removeprefix("torch."), _failures(x, operation))
            for name, shape, x, operation in _operations()
        )
    finally:
        torch.set_num_threads(before)


def _failures(x: torch.Tensor, operation: Operation) -> tuple[str, ...]:
    torch.set_num_threads(1)
    whole = operation(x)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        if not torch.equal(operation(x), whole):
            found.append(f"repeated with {threads} thread(s)")
        for subset in SUBSETS:
            rows, wanted = x[list(subset)], whole[list(subset)]
            if not torch.equal(operation(rows), wanted):
                found.append(f"{len(subset)} rows from {subset[0]}, {threads} thread(s)")
            padded = torch.cat([torch.ones_like(x[:5]), rows, torch.zeros_like(x[:3])])
            if not torch.equal(operation(padded)[5 : 5 + len(subset)], wanted):
                found.append(f"{len(subset)} rows padded and moved, {threads} thread(s)")
    return tuple(found)


def _operations() -> Iterator[tuple[str, str, torch.Tensor, Operation]]:
    """(name, shape, rows, operation): a row of the result depends on one row of its argument."""
    for dtype in (torch.bfloat16, torch.float32):
        for width, outputs in SHAPES:
            x, weight = (
                _adverse(0, ROWS, width, dtype=dtype),
                _adverse(1, outputs, width, dtype=dtype),
            )
            norm = _adverse(2, width, dtype=dtype)
            shape = f"{width} x {outputs}"
            for tp_invariant in (False, True):
                name = "linear, tp_invariant" if tp_invariant else "linear"
                yield name, shape, x, _linear(weight, tp_invariant)
            yield (
                "linear, gradient of x",
                shape,
                _adverse(3, ROWS, outputs, dtype=dtype),
                (lambda grad, w=weight: _gradient(grad, w)),
            )
            yield "rms_norm", str(width), x, lambda t, w=norm: kernels.rms_norm(t, w, 1e-6)
            yield "layer_norm", str(width), x, lambda t, w=norm: kernels.layer_norm(t, w, w, 1e-5)
            yield "softmax", str(width), x, kernels.softmax
            yield "log_softmax", str(width), x, kernels.log_softmax
            yield "sum", str(width), x, lambda t: kernels.sum(t, -1)
            yield "mean", str(width), x, lambda t: kernels.mean(t, -1)
        yield "attention, decode", "300 keys", *_decode(dtype)
        yield "moe_experts", "8 experts", *_experts(dtype)
        yield "lm_head_logprob", "64 x 4096", *_head(dtype)


def _linear(weight: torch.Tensor, tp_invariant: bool) -> Operation:
    return lambda x: kernels.linear(x, weight, tp_invariant=tp_invariant)


def _gradient(grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = grad.new_zeros((grad.shape[0], weight.shape[1])).requires_grad_()
    return torch.autograd.grad(kernels.linear(x, weight), x, grad)[0]


def _decode(dtype: torch.dtype) -> tuple[torch.Tensor, Operation]:
    keys = _adverse(4, 300, 2, 64, dtype=dtype).unsqueeze(0)
    values = _adverse(5, 300, 2, 64, dtype=dtype).unsqueeze(0)

    def attend(q: torch.Tensor) -> torch.Tensor:
        count = torch.arange(len(q) + 1, dtype=torch.int32)
        tables, contexts = torch.zeros_like(count[1:]), torch.full_like(count[1:], 300)
        return kernels.attention_paged(
            q, keys, values, tables.unsqueeze(1), count, contexts, scale=0.1
        )

    return _adverse(6, ROWS, 4, 64, dtype=dtype), attend


def _experts(dtype: torch.dtype) -> tuple[torch.Tensor, Operation]:
    gate_up, down = _adverse(7, 8, 96, 64, dtype=dtype), _adverse(8, 8, 64, 48, dtype=dtype)
    gate = _adverse(9, 8, 64)

    def run(x: torch.Tensor) -> torch.Tensor:
        scores = kernels.softmax(kernels.linear(x, gate, out_dtype=torch.float32))
        weights, ids = kernels.top_k(scores, 2)
        return kernels.moe_experts(x, gate_up, down, weights, ids)

    return _adverse(10, ROWS, 64, dtype=dtype), run


def _head(dtype: torch.dtype) -> tuple[torch.Tensor, Operation]:
    weight = _adverse(11, 4096, 64, dtype=dtype) / 64

    def run(x: torch.Tensor) -> torch.Tensor:
        targets = torch.full((len(x),), 7)
        return torch.stack(kernels.lm_head_logprob(x, weight, targets, temperature=0.7), -1)

    return _adverse(12, ROWS, 64, dtype=dtype), run


def _adverse(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Signed, over twelve binary magnitudes, nearly cancelling along a row."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    values *= torch.exp2(torch.randint(-6, 7, shape, generator=generator).float())
    half = shape[-1] // 2
    values[..., half : 2 * half] = -values[..., :half].flip(-1) * 1.001
    return values.to(dtype)


def show_kernels(checks: tuple[KernelCheck, ...], console: Console) -> None:
    """Prints a line per operation and shape."""
    table = Table("operation", "shape", "dtype", "rows keep their bits", box=None, pad_edge=False)
    for check in checks:
        if check.passed:
            outcome = "[green]yes[/green]"
        else:
            outcome = f"[red]NO[/red]: {'; '.join(check.failures)}"
        table.add_row(check.operation, check.shape, check.dtype, outcome)
    console.print(table)
    failed = sum(not check.passed for check in checks)
    console.print(f"{len(checks)} checks, {failed} failed")


def as_mapping(checks: tuple[KernelCheck, ...]) -> dict[str, Any]:
    """Plain data, for JSON."""
    return {
        "passed": all(check.passed for check in checks),
        "checks": [
            {
                "operation": check.operation,
                "shape": check.shape,
                "dtype": check.dtype,
                "passed": check.passed,
                "failures": list(check.failures),
            }
            for check in checks
        ],
    }
