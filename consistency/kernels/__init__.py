"""Kernels whose result for a row depends on that row, the weights and the contract, nothing else.

One function per operation; each states its formula, its dtypes and its order of reduction. See the
modules of the same names.
"""

from consistency.kernels.grouped import grouped_linear
from consistency.kernels.linear import join_partials, linear, row_parallel_partial
from consistency.kernels.matmul import matmul

__all__ = [
    "grouped_linear",
    "join_partials",
    "linear",
    "matmul",
    "row_parallel_partial",
]
