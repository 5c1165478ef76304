"""Weights quantised the same way on both sides: codec, fake quantisation, checkpoints.

It computes with `consistency.kernels`, so it is imported on its own, not by ``import consistency``.
"""

from __future__ import annotations

from consistency.quant.checkpoint import CheckpointReader
from consistency.quant.export import export_checkpoint
from consistency.quant.formats import BLOCK, BlockFormat, ScaleRule
from consistency.quant.layouts import CheckpointLayout
from consistency.quant.linear import (
    packed_weights,
    quantise_modules,
    quantised_linear,
    quantised_moe_experts,
    restore_modules,
    target_weights,
)
from consistency.quant.mxfp4 import PackedTensor, pack, pack_with_scales, qdq, unpack
from consistency.quant.qdq import FakeQuant, fake_quantise
from consistency.quant.settings import QuantSettings
from consistency.quant.shards import BlockShard, shard_blocks

__all__ = [
    "BLOCK",
    "BlockFormat",
    "BlockShard",
    "CheckpointLayout",
    "CheckpointReader",
    "FakeQuant",
    "PackedTensor",
    "QuantSettings",
    "ScaleRule",
    "export_checkpoint",
    "fake_quantise",
    "pack",
    "pack_with_scales",
    "packed_weights",
    "qdq",
    "quantise_modules",
    "quantised_linear",
    "quantised_moe_experts",
    "restore_modules",
    "shard_blocks",
    "target_weights",
    "unpack",
]
