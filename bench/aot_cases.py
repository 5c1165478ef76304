"""The calls whose kernels `bench.aot` compiles: every operation, at shapes of current models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from consistency import kernels
from consistency.quant import BlockFormat, QuantSettings, ScaleRule, pack, qdq, unpack

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
        "layer_norm": lambda: _gradients(kernels.layer_norm(x, weight, weight, 1e-6), (x, weight)),
        "mean": lambda: kernels.mean(x, 1),
        "embedding": lambda: _gradients(kernels.embedding(positions, x), (x,)),
    }


def heads_of_the_model() -> Iterator[Case]:
    """LM head, sampling and routing."""
    for dtype in (torch.bfloat16, torch.float32):
        yield Case(f"lm_head {_name(dtype)}", lambda d=dtype: _head(d))
        yield Case(f"moe_experts {_name(dtype)}", lambda d=dtype: _experts(d))
    logits = torch.empty(8, VOCABULARY)
    zeros = torch.zeros(8, dtype=torch.int64)
    yield Case(
        "sample",
        lambda: kernels.sample(logits, temperature=torch.ones(8), seeds=zeros, positions=zeros),
    )
    for experts in (16, 128, 512):
        yield Case(f"route {experts} experts", lambda e=experts: _routes(e))


def _head(dtype: torch.dtype) -> None:
    hidden = torch.empty(16, HIDDEN, dtype=dtype, requires_grad=True)
    weight = torch.empty(VOCABULARY, HIDDEN, dtype=dtype, requires_grad=True)
    targets = torch.zeros(16, dtype=torch.int64)
    found = kernels.lm_head_logprob(hidden, weight, targets, temperature=1.0)
    _gradients(found, (hidden, weight))
    share = weight[: VOCABULARY // 2].detach()
    with torch.no_grad():
        part = kernels.lm_head_partial(
            hidden.detach(), share, targets, temperature=1.0, first=0, parts=4
        )
    kernels.join_lm_head_partials([part, part])


def _experts(dtype: torch.dtype) -> None:
    x = torch.empty(64, 2048, dtype=dtype, requires_grad=True)
    gate_up = torch.empty(16, 1536, 2048, dtype=dtype, requires_grad=True)
    down = torch.empty(16, 2048, 768, dtype=dtype, requires_grad=True)
    weights = torch.empty(64, 4, requires_grad=True)
    ids = torch.arange(4).expand(64, 4).contiguous()
    y = kernels.moe_experts(x, gate_up, down, weights, ids)
    _gradients(y, (x, gate_up, down, weights))


def _routes(experts: int) -> None:
    logits = torch.empty(64, experts, requires_grad=True)
    weights, _ = kernels.route(logits, 8)
    _gradients(weights, (logits,))


def quantisers() -> Iterator[Case]:
    """The MXFP4 and MXFP8 codec: packing, values, unpacking."""
    for kind in BlockFormat:
        for dtype in (torch.bfloat16, torch.float32):
            settings = QuantSettings(
                scale_rule=ScaleRule.RCEIL, format=kind, source_dtype=str(dtype)[6:]
            )
            x = torch.empty(HIDDEN, HIDDEN, dtype=dtype)
            name = f"{kind.value} {_name(dtype)}"
            yield Case(f"pack {name}", lambda x=x, s=settings: pack(x, s))
            yield Case(f"qdq {name}", lambda x=x, s=settings: qdq(x, s))
            yield Case(
                f"unpack {name}",
                lambda x=x, s=settings, d=dtype: unpack(pack(x, s), dtype=d),
            )


def attentions() -> Iterator[Case]:
    """Prefill with its backward, and paged decode, for the usual head dimensions."""
    masks = {
        "": {},
        " window sinks cap": {"window": 1024, "sinks": torch.zeros(8), "soft_cap": 30.0},
    }
    for dtype in (*HALVES, torch.float32):
        for head_dim in (64, 128, 256):
            for name, mask in masks.items():
                shape = f"{_name(dtype)} {head_dim}{name}"
                yield Case(
                    f"attention {shape}", lambda d=dtype, h=head_dim, m=mask: _prefill(d, h, m)
                )
                yield Case(f"decode {shape}", lambda d=dtype, h=head_dim, m=mask: _decode(d, h, m))


def _prefill(dtype: torch.dtype, head_dim: int, mask: dict[str, Any]) -> None:
    q, k, v = (torch.empty(8192, h, head_dim, dtype=dtype) for h in (8, 2, 2))
    starts = torch.tensor([0, 4096, 8192], dtype=torch.int32)
    kernels.attention_varlen(q, k, v, starts, scale=1.0, **mask)
    leaves = tuple(x.requires_grad_() for x in (q, k, v))
    _gradients(kernels.attention_varlen(q, k, v, starts, scale=1.0, **mask), leaves)


def _decode(dtype: torch.dtype, head_dim: int, mask: dict[str, Any]) -> None:
    cache = torch.empty(512, 16, 2, head_dim, dtype=dtype)
    tables = torch.zeros(2, 256, dtype=torch.int32)
    starts, contexts = torch.tensor([[0, 1, 2], [4000, 900, 0]], dtype=torch.int32).unbind()
    q = torch.empty(2, 8, head_dim, dtype=dtype)
    kernels.attention_paged(q, cache, cache, tables, starts, contexts[:2], scale=1.0, **mask)


def all_cases() -> Iterator[Case]:
    yield from products()
    yield from grouped_products()
    yield from row_operations()
    yield from heads_of_the_model()
    yield from quantisers()
    yield from attentions()
