"""What each overridden aten operator becomes: a kernel of the contract, or an exception.

Every function has the signature of its operator. It either computes by the contract or raises
`UnsupportedError` naming the operator and the argument. Integers and booleans, whose sums are exact
in any order, go to torch's own kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from consistency import kernels
from consistency.errors import InvalidInputError, UnsupportedError
from consistency.kernels._arguments import DTYPE_CODES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

REFUSED = (
    "addbmm",
    "convolution",
    "logsumexp",
    "native_group_norm",
    "native_layer_norm",
    "std.correction",
    "std_mean.correction",
    "var.correction",
    "var_mean.correction",
    "vdot",
    "_fused_rms_norm",
    "_grouped_mm",
    "_native_multi_head_attention",
    "_scaled_mm",
    "_transformer_encoder_layer_fwd",
)
"""Operators whose rows may depend on the batch and for which the contract has no kernel."""


class Operators:
    """The operators that `batch_invariant` replaces.

    Args:
        tp_invariant: cut the reductions of matrix products into chunks, as in `kernels.linear`.
        native: calls torch's own kernel of an operator: native(name, *args, **kwargs).
    """

    def __init__(self, *, tp_invariant: bool, native: Callable[..., Any]) -> None:
        self._tp_invariant = tp_invariant
        self._native = native

    def table(self) -> dict[str, Callable[..., Any]]:
        """Operator name (with overload) -> what replaces it."""
        plain = {
            "mm": self.mm,
            "mv": self.mv,
            "dot": self.dot,
            "addmm": self.addmm,
            "addmv": self.addmv,
            "bmm": self.bmm,
            "baddbmm": self.baddbmm,
            "linear": self.linear,
            "_softmax": self.softmax,
            "_log_softmax": self.log_softmax,
        }
        table: dict[str, Callable[..., Any]] = {}
        for name, function in plain.items():
            table[name] = function
            table[f"{name}.out"] = _into_out(name, function)
        for name in ("mm", "bmm", "addmm", "baddbmm"):
            table[f"{name}.dtype"] = plain[name]
            table[f"{name}.dtype_out"] = _into_out(name, plain[name])
        table |= {
            "sum": self.sum,
            "sum.out": _into_out("sum", self.sum),
            "sum.dim_IntList": self.sum_over,
            "sum.IntList_out": _into_out("sum", self.sum_over),
            "mean": self.mean,
            "mean.dtype_out": _into_out("mean", self.mean),
            "mean.dim": self.mean_over,
            "mean.out": _into_out("mean", self.mean_over),
            "rms_norm": self.rms_norm,
            "layer_norm": self.layer_norm,
            "scaled_dot_product_attention": self.attention,
        }
        return table | {name: _refusing(name) for name in REFUSED}

    def mm(
        self, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        if _exact(a):
            return self._native("mm", a, b)
        _require("mm", self=a, mat2=b)
        return kernels.matmul(a, b, out_dtype=out_dtype, tp_invariant=self._tp_invariant)

    def mv(self, a: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        if _exact(a):
            return self._native("mv", a, vector)
        _require("mv", self=a, vec=vector)
        return kernels.matmul(a, vector.unsqueeze(1), tp_invariant=self._tp_invariant).squeeze(1)

    def dot(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if _exact(a):
            return self._native("dot", a, b)
        _require("dot", self=a, tensor=b)
        product = kernels.matmul(a.unsqueeze(0), b.unsqueeze(1), tp_invariant=self._tp_invariant)
        return product.view(())

    def addmm(
        self,
        bias: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        out_dtype: torch.dtype | None = None,
        *,
        beta: float = 1,
        alpha: float = 1,
    ) -> torch.Tensor:
        if _exact(a):
            return self._native("addmm", bias, a, b, beta=beta, alpha=alpha)
        _require("addmm", self=bias, mat1=a, mat2=b)
        return kernels.addmm(
            bias, a, b, alpha=alpha, beta=beta, out_dtype=out_dtype, tp_invariant=self._tp_invariant
        )

    def addmv(
        self,
        bias: torch.Tensor,
        a: torch.Tensor,
        vector: torch.Tensor,
        *,
        beta: float = 1,
        alpha: float = 1,
    ) -> torch.Tensor:
        column = bias.unsqueeze(-1) if bias.dim() else bias
        return self.addmm(column, a, vector.unsqueeze(1), beta=beta, alpha=alpha).squeeze(1)

    def bmm(
        self, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        if _exact(a):
            return self._native("bmm", a, b)
        _require("bmm", self=a, mat2=b)
        return kernels.bmm(a, b, out_dtype=out_dtype, tp_invariant=self._tp_invariant)

    def baddbmm(
        self,
        bias: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        out_dtype: torch.dtype | None = None,
        *,
        beta: float = 1,
        alpha: float = 1,
    ) -> torch.Tensor:
        if _exact(a):
            return self._native("baddbmm", bias, a, b, beta=beta, alpha=alpha)
        _require("baddbmm", self=bias, batch1=a, batch2=b)
        if beta != 0 and torch.is_grad_enabled() and bias.requires_grad:
            shape = (a.shape[0], a.shape[1], b.shape[2])
            if bias.shape != shape:
                raise UnsupportedError(
                    f"aten::baddbmm under batch_invariant: self {tuple(bias.shape)} is broadcast "
                    f"to {shape} and requires a gradient, which would be summed outside the "
                    "contract: expand it yourself through kernels.sum"
                )
        product = kernels.bmm(a, b, out_dtype=torch.float32, tp_invariant=self._tp_invariant)
        if alpha != 1:
            product = product * alpha
        if beta != 0:
            product = product + bias.float() * beta
        return product.to(out_dtype or a.dtype)

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        _require("linear", input=x, weight=weight, bias=bias)
        if weight.dim() == 1:
            return self.linear(x, weight.unsqueeze(0), bias).squeeze(-1)
        return kernels.linear(x, weight, bias, tp_invariant=self._tp_invariant)

    def softmax(self, x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        return _along("_softmax", kernels.softmax, x, dim, half_to_float)

    def log_softmax(self, x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        return _along("_log_softmax", kernels.log_softmax, x, dim, half_to_float)

    def sum(self, x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.sum_over(x, None, dtype=dtype)

    def sum_over(
        self,
        x: torch.Tensor,
        dim: Sequence[int] | None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        if _exact(x) and (dtype is None or not dtype.is_floating_point):
            return self._native("sum.dim_IntList", x, dim, keepdim, dtype=dtype)
        _require("sum", self=x)
        _require_dtype("sum", dtype)
        # torch reads an empty list as every dimension.
        return kernels.sum(x, dim or None, keepdim=keepdim, out_dtype=dtype)

    def mean(self, x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.mean_over(x, None, dtype=dtype)

    def mean_over(
        self,
        x: torch.Tensor,
        dim: Sequence[int] | None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        _require("mean", self=x)
        _require_dtype("mean", dtype)
        return kernels.mean(x, dim or None, keepdim=keepdim, out_dtype=dtype)

    def rms_norm(
        self,
        x: torch.Tensor,
        normalized_shape: Sequence[int],
        weight: torch.Tensor | None = None,
        eps: float | None = None,
    ) -> torch.Tensor:
        _require("rms_norm", input=x, weight=weight)
        _require_row("rms_norm", x, normalized_shape)
        if weight is None:
            weight = x.new_ones(normalized_shape)
        return kernels.rms_norm(x, weight, torch.finfo(x.dtype).eps if eps is None else eps)

    def layer_norm(
        self,
        x: torch.Tensor,
        normalized_shape: Sequence[int],
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        eps: float = 1e-5,
        cudnn_enable: bool = True,
    ) -> torch.Tensor:
        _require("layer_norm", input=x, weight=weight, bias=bias)
        _require_row("layer_norm", x, normalized_shape)
        return kernels.layer_norm(x, weight, bias, eps)

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        name = "scaled_dot_product_attention"
        _require(name, query=query, key=key, value=value)
        if attn_mask is not None:
            _refuse(name, "attn_mask", "a tensor", "use is_causal, or kernels.attention_varlen")
        if dropout_p != 0.0:
            _refuse(name, "dropout_p", dropout_p, "set it to 0")
        if query.dim() != 4 or key.dim() != 4 or value.shape != key.shape:
            shapes = f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
            _refuse(name, "query, key and value", shapes, "use [batch, heads, length, head_dim]")
        if query.shape[1] != key.shape[1] and not enable_gqa:
            _refuse(name, "enable_gqa", enable_gqa, "set it, as query has more heads than key")
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        if is_causal and query.shape[2] == key.shape[2]:
            return _causal(query, key, value, factor)
        if query.shape[2] == 1 and not is_causal:
            return _decode(name, query, key, value, factor)
        return _refuse(
            name,
            "is_causal",
            f"{is_causal} with {query.shape[2]} queries and {key.shape[2]} keys",
            "attention of the contract is causal, over equal lengths, or of one query",
        )


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    batch, _, length, _ = q.shape
    starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * length
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    out = kernels.attention_varlen(q, k, v, starts, scale=scale)
    return out.view(batch, length, *out.shape[1:]).transpose(1, 2)


def _decode(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        _refuse(name, "query", "one per sequence that requires a gradient", "use is_causal=True")
    batch, _, length, _ = k.shape
    numbers = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    if length == 0:
        _refuse(name, "key", tuple(k.shape), "give at least one key")
    out = kernels.attention_paged(
        q.squeeze(2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        numbers[:-1].unsqueeze(1),
        numbers,
        torch.full_like(numbers[:-1], length),
        scale=scale,
    )
    return out.unsqueeze(2)


def _along(
    name: str,
    function: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    dim: int,
    half_to_float: bool,
) -> torch.Tensor:
    _require(name, self=x)
    dtype = torch.float32 if half_to_float else x.dtype
    if x.dim() == 0:
        return function(x.unsqueeze(0)).squeeze(0).to(dtype)
    return function(x.movedim(dim, -1)).movedim(-1, dim).to(dtype)


def _exact(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _require(name: str, **tensors: torch.Tensor | None) -> None:
    for argument, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in DTYPE_CODES:
            _refuse(name, argument, tensor.dtype, "use float32, bfloat16 or float16")


def _require_dtype(name: str, dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in DTYPE_CODES:
        _refuse(name, "dtype", dtype, "use float32, bfloat16 or float16")


def _require_row(name: str, x: torch.Tensor, normalized_shape: Sequence[int]) -> None:
    if len(normalized_shape) != 1 or x.dim() == 0 or x.shape[-1] != normalized_shape[0]:
        _refuse(
            name, "normalized_shape", tuple(normalized_shape), "the norms are of the last dimension"
        )


def _refuse(name: str, argument: str, value: Any, fix: str) -> NoReturn:
    raise UnsupportedError(
        f"aten::{name} under batch_invariant does not honour {argument}={value}: {fix}"
    )


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(*arguments: Any, **options: Any) -> NoReturn:
        raise UnsupportedError(
            f"aten::{name} under batch_invariant: the contract has no kernel for this operator, "
            "and torch's may give a row other bits in another batch: call it outside the context"
        )

    return refuse


def _into_out(name: str, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def into_out(*arguments: Any, out: torch.Tensor, **options: Any) -> torch.Tensor:
        if torch.is_grad_enabled() and any(
            isinstance(t, torch.Tensor) and t.requires_grad for t in (*arguments, out)
        ):
            _refuse(name, "out", "a tensor while gradients are on", "assign the result instead")
        result = function(*arguments, **options)
        if out.dtype != result.dtype or out.device != result.device:
            raise InvalidInputError(
                f"aten::{name} under batch_invariant: out must be {result.dtype} on "
                f"{result.device}, got {out.dtype} on {out.device}"
            )
        if out.shape != result.shape:
            if out.numel():
                raise InvalidInputError(
                    f"aten::{name} under batch_invariant: out must have shape "
                    f"{tuple(result.shape)}, got {tuple(out.shape)}"
                )
            out.resize_(result.shape)
        return out.copy_(result)

    return into_out
