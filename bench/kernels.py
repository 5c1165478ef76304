"""`python -m bench.kernels`: CPU matrix products and row operations against torch, in one run.

Prints ratios of torch's time to ours (above 1: ours is faster), medians of interleaved calls.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional

from consistency import kernels

REPEATS = 7
SHAPES = ((1, 576, 49152), (16, 576, 1536), (64, 576, 1536), (256, 1536, 576))


def interleaved(ours: Callable[[], object], peer: Callable[[], object]) -> float:
    """Median of the peer's time divided by ours, pair by pair."""
    ours()
    peer()
    ratios = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        ours()
        middle = time.perf_counter()
        peer()
        ratios.append((time.perf_counter() - middle) / (middle - begun))
    return statistics.median(ratios)


def main() -> None:
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    print("operation                      torch / ours")
    for rows, width, outputs in SHAPES:
        x = torch.randn(rows, width, dtype=torch.bfloat16)
        weight = torch.randn(outputs, width, dtype=torch.bfloat16)
        wide_x, wide_weight = x.float(), weight.float()
        shape = f"{rows}x{width}x{outputs}"
        ratio = interleaved(
            lambda x=x, w=weight: kernels.linear(x, w),
            lambda x=x, w=weight: functional.linear(x, w),
        )
        print(f"linear bf16 {shape:<18} {ratio:12.2f}")
        ratio = interleaved(
            lambda x=wide_x, w=wide_weight: kernels.linear(x, w),
            lambda x=wide_x, w=wide_weight: functional.linear(x, w),
        )
        print(f"linear fp32 {shape:<18} {ratio:12.2f}")
    logits = torch.randn(16, 49152)
    ratio = interleaved(
        lambda: kernels.log_softmax(logits), lambda: torch.log_softmax(logits, dim=-1)
    )
    print(f"log_softmax 16x49152           {ratio:12.2f}")


if __name__ == "__main__":
    main()
