"""The drift table on a tiny model: the aligned engine is exact, the others are what they say."""

from __future__ import annotations

import pytest
import torch

from bench.quant_drift import ALIGNED, NO_QDQ, Case, cut_blocks, main, measure
from consistency import NumericsContract
from consistency.quant import QuantSettings, ScaleRule, qdq
from integrations.trainer.model import ModelConfig, init_random
from integrations.trainer.trajectory import GenerationRequest

RCEIL = QuantSettings(scale_rule=ScaleRule.RCEIL)


def test_every_alternative_is_measured_and_only_the_aligned_engine_is_exact():
    config = ModelConfig(
        model_type="qwen3_moe",
        hidden_size=64,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=32,
        intermediate_size=64,
        vocab_size=40,
        max_positions=64,
        qk_norm=True,
        experts=4,
        experts_per_token=2,
        moe_intermediate_size=96,
        moe_layers=(0, 1),
        initializer_range=0.2,
    )
    masters = init_random(config, seed=0, dtype=torch.float32)
    quantised = tuple(name for name, weight in masters.items() if weight.dim() == 3)
    requests = [GenerationRequest(f"r{i}", (1 + i, 2), 8, 1.0, i) for i in range(16)]
    case = Case(config, NumericsContract(), masters, quantised, RCEIL, requests)
    rows = {row.engine: row for row in measure(case)}
    assert next(iter(rows)) == ALIGNED and next(reversed(rows)) == NO_QDQ
    aligned = rows.pop(ALIGNED)
    assert (aligned.exact_fraction, aligned.k3_kl, aligned.values_differ) == (1.0, 0.0, 0.0)
    # The logarithm differs only for magnitudes far from 1, which these weights do not have.
    assert rows.pop("scale as ceil(log2(amax / 6)) in floating point").tokens == 128
    assert len(rows) == 13
    for row in rows.values():
        assert row.tokens == 128
        assert 0 < row.values_differ < 1, row
        assert row.exact_fraction < 1 and row.k3_kl > 0 and row.max_abs_diff > 0, row
    assert rows[NO_QDQ].k3_kl > rows["quantised from float32"].k3_kl


def test_cut_blocks_begin_anew_at_every_rank():
    master = torch.randn(3, 96)
    found = cut_blocks(master, RCEIL, 2)
    assert found.shape == master.shape
    for rank in (0, 48):
        share = torch.nn.functional.pad(master[:, rank : rank + 48], (0, 16))
        assert torch.equal(found[:, rank : rank + 48], qdq(share, RCEIL).bfloat16()[:, :48])
    assert torch.equal(cut_blocks(master, RCEIL, 3), qdq(master, RCEIL).bfloat16())


def test_a_folder_that_is_no_run_ends_with_one_line(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "is no run" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([])
