"""Products with packed MXFP4 weights on GPUs.

The weight is unpacked to bf16 and multiplied by the grouped product of bf16 weights. The values are
exact, so the bits are those of the product with the weights that the codes stand for. The unpacked
copy passes through memory; unpacking inside the product would spare that.

Order of reduction:
    That of `grouped`.
"""

from __future__ import annotations

import torch

from consistency.errors import UnsupportedError
from consistency.kernels.triton.grouped import multiply_grouped_rows
from consistency.kernels.triton.microscaling import dequantise_blocks
from consistency.quant.formats import BLOCK, BlockFormat


def multiply_packed(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    chunks: int,
) -> torch.Tensor:
    """out[rows of g] = x[rows of g] @ unpack(codes[g], scales[g])^T for checked arguments.

    Raises:
        UnsupportedError: a bias.
    """
    if bias is not None:
        raise UnsupportedError("packed products on a GPU take no bias: add it afterwards")
    shape = (*scales.shape[:-1], scales.shape[-1] * BLOCK)
    weight = torch.empty(shape, dtype=torch.bfloat16, device=codes.device)
    if weight.numel():
        dequantise_blocks(codes, scales, BlockFormat.MXFP4, weight)
    return multiply_grouped_rows(x, offsets, weight.transpose(1, 2), out, chunks=chunks)
