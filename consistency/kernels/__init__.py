"""Kernels whose result for a row depends on that row, the weights and the contract, nothing else.

One function per operation; each states its formula, its dtypes and its order of reduction. See the
modules of the same names.
"""

from consistency.kernels.attention import attention_paged, attention_varlen
from consistency.kernels.embedding import embedding
from consistency.kernels.grouped import grouped_linear
from consistency.kernels.layer_norm import layer_norm
from consistency.kernels.linear import join_partials, linear, row_parallel_partial
from consistency.kernels.lm_head import lm_head_logits, lm_head_logprob, token_logprob
from consistency.kernels.matmul import addmm, bmm, matmul
from consistency.kernels.moe import moe_combine, moe_experts, moe_permute
from consistency.kernels.mxfp4 import mxfp4_grouped_linear, mxfp4_linear, mxfp4_moe_experts
from consistency.kernels.reductions import mean, sum
from consistency.kernels.rms_norm import add_rms_norm, rms_norm
from consistency.kernels.rotary import rotary, rotary_table
from consistency.kernels.route import route
from consistency.kernels.sampling import gumbel_noise, sample
from consistency.kernels.silu_and_mul import silu_and_mul
from consistency.kernels.softmax import log_softmax, softmax
from consistency.kernels.top_k import top_k
from consistency.kernels.vocabulary_parallel import join_lm_head_partials, lm_head_partial

__all__ = [
    "add_rms_norm",
    "addmm",
    "attention_paged",
    "attention_varlen",
    "bmm",
    "embedding",
    "grouped_linear",
    "gumbel_noise",
    "join_lm_head_partials",
    "join_partials",
    "layer_norm",
    "linear",
    "lm_head_logits",
    "lm_head_logprob",
    "lm_head_partial",
    "log_softmax",
    "matmul",
    "mean",
    "moe_combine",
    "moe_experts",
    "moe_permute",
    "mxfp4_grouped_linear",
    "mxfp4_linear",
    "mxfp4_moe_experts",
    "rms_norm",
    "rotary",
    "rotary_table",
    "route",
    "row_parallel_partial",
    "sample",
    "silu_and_mul",
    "softmax",
    "sum",
    "token_logprob",
    "top_k",
]
