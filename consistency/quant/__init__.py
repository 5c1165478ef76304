"""Weights quantised the same way on both sides: codec, fake quantisation, checkpoints.

It computes with `consistency.kernels`, so it is imported on its own, not by ``import consistency``.
"""

from __future__ import annotations

from consistency.quant.formats import BLOCK, BlockFormat, ScaleRule
from consistency.quant.mxfp4 import PackedTensor, pack, pack_with_scales, qdq, unpack
from consistency.quant.settings import QuantSettings

__all__ = [
    "BLOCK",
    "BlockFormat",
    "PackedTensor",
    "QuantSettings",
    "ScaleRule",
    "pack",
    "pack_with_scales",
    "qdq",
    "unpack",
]
