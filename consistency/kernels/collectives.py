"""Tensor-, vocabulary- and sequence-parallel forms of the kernels over torch.distributed.

Every function gives, on 1, 2, 4 and 8 ranks, the bits of the plain kernel with `tp_invariant=True`
on one: forward and backward, on each rank. A rank computes the subtree of the contract's tree that
its share of the reduction is, and the ranks finish the tree in fp32 with one rounding at the end
(see `_ranks`). All ranks of the group call the same function in the same order, as for any
collective.

A weight that fuses several projections along N (qkv, gate and up) is not cut into contiguous rows
by its ranks; give each projection its own call.
"""

from __future__ import annotations

from consistency.kernels.parallel_head import vocabulary_parallel_logprob
from consistency.kernels.parallel_linear import (
    column_parallel_linear,
    row_parallel_linear,
    vocabulary_parallel_logits,
)
from consistency.kernels.sequence_parallel import (
    gather_sequence,
    scatter_sequence,
    shared_weight,
    tree_all_reduce,
    tree_reduce_scatter,
)

__all__ = [
    "column_parallel_linear",
    "gather_sequence",
    "row_parallel_linear",
    "scatter_sequence",
    "shared_weight",
    "tree_all_reduce",
    "tree_reduce_scatter",
    "vocabulary_parallel_logits",
    "vocabulary_parallel_logprob",
]
