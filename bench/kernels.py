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
SHAPES = (
    *((rows, width, width) for width in (576, 1536, 4096) for rows in (1, 16, 64)),
    (1, 576, 49152),
)


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


def _attention() -> None:
    """Prefill of 512 tokens and decode of 16 sequences over 1024 keys, 9 query and 3 key heads."""
    sdpa = functional.scaled_dot_product_attention
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v = (torch.randn(512, heads, 64).to(dtype) for heads in (9, 3, 3))
        starts = torch.tensor([0, 512], dtype=torch.int32)
        heads_first = [t.transpose(0, 1).unsqueeze(0) for t in (q, k, v)]
        ratio = interleaved(
            lambda q=q, k=k, v=v, s=starts: kernels.attention_varlen(q, k, v, s, scale=0.125),
            lambda t=heads_first: sdpa(t[0], t[1], t[2], is_causal=True, enable_gqa=True),
        )
        print(f"prefill 512 {dtype!s:<18} {ratio:12.2f}")
        q = torch.randn(16, 9, 64).to(dtype)
        keys, values = (torch.randn(16, 1024, 3, 64).to(dtype) for _ in range(2))
        numbers = torch.arange(17, dtype=torch.int32)
        tables, contexts = numbers[:-1, None], torch.full((16,), 1024, dtype=torch.int32)
        ratio = interleaved(
            lambda q=q, k=keys, v=values, t=tables, c=contexts, n=numbers: kernels.attention_paged(
                q, k, v, t, n, c, scale=0.125
            ),
            lambda q=q, k=keys, v=values: sdpa(
                q.unsqueeze(2), k.transpose(1, 2), v.transpose(1, 2), enable_gqa=True
            ),
        )
        print(f"decode 16 x 1024 {dtype!s:<13} {ratio:12.2f}")


def _head() -> None:
    """fp32 logits of a bf16 head, against an fp32 head whose weight was cast before."""
    weight = torch.randn(49152, 576, dtype=torch.bfloat16)
    cast = weight.float()
    for rows in (1, 64):
        hidden = torch.randn(rows, 576, dtype=torch.bfloat16)
        ratio = interleaved(
            lambda h=hidden: kernels.lm_head_logits(h, weight),
            lambda h=hidden: functional.linear(h.float(), cast),
        )
        print(f"fp32 head {rows} x 576 x 49152       {ratio:12.2f}")


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
    _attention()
    _head()
    logits = torch.randn(16, 49152)
    ratio = interleaved(
        lambda: kernels.log_softmax(logits), lambda: torch.log_softmax(logits, dim=-1)
    )
    print(f"log_softmax 16x49152           {ratio:12.2f}")


if __name__ == "__main__":
    main()
