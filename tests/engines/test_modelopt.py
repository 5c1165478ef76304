"""The real Model Optimizer with our backend."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from consistency.quant import QuantSettings, ScaleRule, qdq
from integrations import modelopt as lockstep_modelopt

pytestmark = pytest.mark.engines


@pytest.fixture
def mtq():
    """Model Optimizer's quantisation module, with the backend registered."""
    from modelopt.torch import quantization  # pyright: ignore[reportMissingImports]

    lockstep_modelopt.register()
    yield quantization
    lockstep_modelopt.unregister()


@pytest.mark.parametrize("name", ["MXFP4_DEFAULT_CFG", "MXFP4_MLP_WEIGHT_ONLY_CFG"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantize_runs_forward_and_backward_on_the_cpu_with_our_bits(mtq, name, dtype):
    torch.manual_seed(0)
    model = nn.Sequential()
    linear = nn.Linear(64, 96, bias=False, dtype=dtype)
    model.add_module("mlp", linear)
    config = lockstep_modelopt.with_backend(getattr(mtq, name), scale_rule="rceil")
    weight = linear.weight.detach().clone()
    quantised = mtq.quantize(model, config)
    x = torch.randn(5, 64, dtype=dtype, requires_grad=True)
    settings = QuantSettings(scale_rule=ScaleRule.RCEIL)
    seen = qdq(x, settings) if name == "MXFP4_DEFAULT_CFG" else x
    expected = nn.functional.linear(seen, qdq(weight, settings))
    y = quantised(x)
    assert torch.equal(y, expected)
    grad = torch.randn_like(y)
    y.backward(grad)
    assert quantised.mlp.weight.grad is not None
    assert torch.equal(quantised.mlp.weight.grad, grad.t() @ seen)
    assert x.grad is not None
