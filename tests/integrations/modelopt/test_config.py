"""Configurations of Model Optimizer: read, written, refused; the backend's arithmetic."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from consistency.errors import InvalidInputError, UnsupportedError
from consistency.quant import BlockFormat, QuantSettings, ScaleRule, qdq
from integrations.modelopt import BACKEND, settings_of, with_backend
from integrations.modelopt.backend import fake_quantise_with

MX4 = {"num_bits": (2, 1), "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": (8, 0)}}
MX8 = {"num_bits": (4, 3), "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": (8, 0)}}
CONFIG = {
    "quant_cfg": [
        {"quantizer_name": "*", "enable": False},
        {"quantizer_name": "*weight_quantizer", "cfg": MX4},
        {"quantizer_name": "*input_quantizer", "cfg": MX8},
        {"quantizer_name": "*k_quantizer", "cfg": {"num_bits": (4, 3), "axis": None}},
    ],
    "algorithm": None,
}


def test_every_mx_quantizer_gets_the_backend_and_the_original_is_left_alone():
    changed = with_backend(CONFIG, scale_rule="even")
    assert settings_of(changed) == {
        "*weight_quantizer": QuantSettings(scale_rule=ScaleRule.EVEN),
        "*input_quantizer": QuantSettings(scale_rule=ScaleRule.EVEN, format=BlockFormat.MXFP8),
    }
    assert "backend" not in changed["quant_cfg"][3]["cfg"]
    assert settings_of(CONFIG) == {}
    assert changed["quant_cfg"][1]["cfg"]["backend"] == BACKEND


def test_configurations_without_mx_quantizers_and_unknown_rules_are_refused():
    with pytest.raises(InvalidInputError, match="no MXFP4 or MXFP8 quantizer"):
        with_backend({"quant_cfg": CONFIG["quant_cfg"][:1]}, scale_rule="even")
    with pytest.raises(InvalidInputError, match="scale_rule is 'up'"):
        with_backend(CONFIG, scale_rule="up")
    with pytest.raises(InvalidInputError, match="quant_cfg is a dict"):
        with_backend({"quant_cfg": {}}, scale_rule="even")


def test_the_backend_is_our_qdq_with_a_straight_through_gradient():
    attributes = with_backend(CONFIG, scale_rule="rceil")["quant_cfg"][1]["cfg"]
    quantizer = SimpleNamespace(
        num_bits=attributes["num_bits"],
        block_sizes=attributes["block_sizes"],
        backend_extra_args=attributes["backend_extra_args"],
    )
    x = torch.randn(4, 64, requires_grad=True)
    y = fake_quantise_with(x, quantizer)
    assert torch.equal(y, qdq(x, QuantSettings(scale_rule=ScaleRule.RCEIL)))
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(4, 64))
    quantizer.num_bits = (4, 3)
    with pytest.raises(UnsupportedError, match="say mxfp4"):
        fake_quantise_with(x, quantizer)
