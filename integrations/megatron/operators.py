"""What replaces the `forward` of one dense module of Megatron-Core; each holds that module."""

# Megatron-Core is installed beside the engine tests only.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from consistency import kernels
from consistency.kernels import collectives

__all__ = [
    "ColumnLinear",
    "Embedding",
    "LmHead",
    "Loss",
    "Mlp",
    "Norm",
    "RowLinear",
    "own_weight",
]


@dataclass(frozen=True, slots=True)
class ColumnLinear:
    """`ColumnParallelLinear` on `kernels.linear`, its columns spread over the ranks.

    Args:
        module: the module.
        tp_invariant: as in `NumericsContract`.
        projections: how many projections lie under one another in the weight, each cut over the
            ranks by itself (gate and up: 2). Groups of query heads with their key and value are cut
            as one.
    """

    module: Any
    tp_invariant: bool
    projections: int = 1

    def __call__(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, None]:
        del runtime_gather_output  # only the head is ever gathered, and `LmHead` does that
        weight = _weight(self.module, weight)
        # The gradient of the input is a sum over the columns. Its tree is the same for every number
        # of ranks only if each projection has its own.
        parts = weight.chunk(self.projections) if self.tp_invariant else (weight,)
        outputs = [self._product(input_, part) for part in parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1), None

    def _product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        group = self.module.tp_group
        if group.size() == 1:
            return kernels.linear(x, weight, tp_invariant=self.tp_invariant)
        out = collectives.column_parallel_linear(
            x.flatten(0, -2),
            weight,
            group=group,
            sequence_parallel=bool(self.module.sequence_parallel),
        )
        return out.view(-1, *x.shape[1:-1], out.shape[-1])


@dataclass(frozen=True, slots=True)
class RowLinear:
    """`RowParallelLinear` on `kernels.linear`, its features spread over the ranks."""

    module: Any
    tp_invariant: bool

    def __call__(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        module, group = self.module, self.module.tp_group
        if group.size() == 1:
            weight = own_weight(module.weight)
            return kernels.linear(input_, weight, tp_invariant=self.tp_invariant), None
        out = collectives.row_parallel_linear(
            input_.flatten(0, -2),
            own_weight(module.weight),
            group=group,
            sequence_parallel=bool(module.sequence_parallel),
        )
        return out.view(-1, *input_.shape[1:-1], out.shape[-1]), None


@dataclass(frozen=True, slots=True)
class LmHead:
    """The output layer on `kernels.lm_head_logits`: fp32 logits ``[s, b, vocabulary]``."""

    module: Any

    def __call__(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, None]:
        module, group = self.module, self.module.tp_group
        weight = _weight(module, weight)
        rows = input_.flatten(0, -2)
        if group.size() == 1:
            logits = kernels.lm_head_logits(rows, weight)
        else:
            gather = module.gather_output
            logits = collectives.vocabulary_parallel_logits(
                rows,
                weight,
                group=group,
                sequence_parallel=bool(module.sequence_parallel),
                gather_output=gather if runtime_gather_output is None else runtime_gather_output,
            )
        return logits.view(-1, *input_.shape[1:-1], logits.shape[-1]), None


@dataclass(frozen=True, slots=True)
class Loss:
    """`compute_language_model_loss` on `kernels.token_logprob`, which the rollout engine calls too.

    Args:
        head: the output layer.
    """

    head: Any

    def __call__(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Minus the log-probability of each label.

        Args:
            labels: int64 ``[b, s]``.
            logits: fp32 ``[s, b, vocabulary]``, or this rank's columns of them.

        Returns:
            fp32 ``[b, s]``.
        """
        head = self.head
        if logits.shape[-1] != head.output_size:
            logits = gather_from_tensor_model_parallel_region(logits, group=head.tp_group)
        targets = labels.transpose(0, 1)
        logprobs, _ = kernels.token_logprob(
            logits.flatten(0, 1), targets.flatten(), temperature=1.0
        )
        return -logprobs.view(targets.shape).transpose(0, 1)


@dataclass(frozen=True, slots=True)
class Norm:
    """`torch.nn.RMSNorm` or `LayerNorm` on the kernel of the same name."""

    module: Any

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        module = self.module
        if isinstance(module, torch.nn.RMSNorm):
            eps = torch.finfo(x.dtype).eps if module.eps is None else module.eps
            return kernels.rms_norm(x, own_weight(module.weight), eps)
        return kernels.layer_norm(x, own_weight(module.weight), own_weight(module.bias), module.eps)


@dataclass(frozen=True, slots=True)
class Mlp:
    """A SwiGLU layer whose activation is `kernels.silu_and_mul`; its projections are replaced by
    themselves."""

    module: Any

    def __call__(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **_: Any
    ) -> tuple[torch.Tensor, None]:
        del per_token_scale  # given to experts only, which `MoeExperts` computes
        gate_up, _bias = self.module.linear_fc1(hidden_states)
        out, _bias = self.module.linear_fc2(kernels.silu_and_mul(gate_up))
        return out, None


@dataclass(frozen=True, slots=True)
class Embedding:
    """`VocabParallelEmbedding` on `kernels.embedding`, whose gradient is deterministic."""

    module: Any

    def __call__(self, input_: torch.Tensor) -> torch.Tensor:
        """``[b, s]`` ids to ``[b, s, h]``, or ``[s / ranks, b, h]`` under sequence parallelism."""
        module, group = self.module, self.module.tp_group
        if group.size() == 1:
            return kernels.embedding(input_, own_weight(module.weight))
        elsewhere = (input_ < module.vocab_start_index) | (input_ >= module.vocab_end_index)
        local = (input_ - module.vocab_start_index).masked_fill(elsewhere, 0)
        rows = kernels.embedding(local, own_weight(module.weight))
        # One rank has the row, the others have zeros: the sum over ranks is exact.
        partial = rows.masked_fill(elsewhere[..., None], 0.0).float()
        if module.reduce_scatter_embeddings:
            return collectives.tree_reduce_scatter(
                partial.transpose(0, 1), group=group, out_dtype=rows.dtype
            )
        return collectives.tree_all_reduce(partial, group=group, out_dtype=rows.dtype)


def own_weight(weight: torch.Tensor) -> torch.Tensor:
    """The weight without its `main_grad`.

    The kernels would add a gradient there themselves. Megatron-Core's data parallelism wants to be
    handed each gradient, to add it in its own dtype and to know when a bucket is full.
    """
    return weight.view_as(weight) if hasattr(weight, "main_grad") else weight


def _weight(module: Any, given: torch.Tensor | None) -> torch.Tensor:
    """The weight that a call brings along (a tied embedding), or the module's own."""
    return own_weight(module.weight if given is None else given)
