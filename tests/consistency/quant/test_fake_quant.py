"""Training on QDQ weights: values, gradients, caching, targets, shards."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from consistency import kernels
from consistency.errors import InvalidInputError, UnsupportedError
from consistency.quant import (
    CheckpointLayout,
    CheckpointReader,
    FakeQuant,
    PackedTensor,
    QuantSettings,
    ScaleRule,
    export_checkpoint,
    fake_quantise,
    pack,
    packed_weights,
    qdq,
    quantise_modules,
    quantised_linear,
    quantised_moe_experts,
    restore_modules,
    shard_blocks,
    unpack,
)

RCEIL = QuantSettings(scale_rule=ScaleRule.RCEIL)
FLOOR = QuantSettings(scale_rule=ScaleRule.FLOOR)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 64, 32))
        self.down_proj = nn.Parameter(torch.randn(3, 32, 32))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(32, 64, bias=False)
        self.gate = nn.Linear(32, 3, bias=False)
        self.gate_up_proj = nn.Linear(32, 64, bias=True)
        self.experts = Experts()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def test_the_gradient_passes_straight_through_or_stops_at_saturation():
    x = torch.tensor([[7.0, 1, -3, 0.5, -6.5] + [0.0] * 27], requires_grad=True)
    grad = torch.arange(32.0)[None] + 1
    fake_quantise(x, FLOOR).backward(grad)
    assert x.grad is not None and torch.equal(x.grad, grad)
    x.grad = None
    fake_quantise(x, FLOOR, gradient="clipped").backward(grad)
    masked = grad.clone()
    masked[0, [0, 4]] = 0
    assert x.grad is not None and torch.equal(x.grad, masked)
    x.grad = None
    fake_quantise(x, RCEIL, gradient="clipped").backward(grad)
    assert x.grad is not None and torch.equal(x.grad, grad)
    with pytest.raises(InvalidInputError, match="gradient is 'none'"):
        fake_quantise(x, RCEIL, gradient="none")  # type: ignore[arg-type]


def test_an_fp32_master_is_seen_as_the_engine_sees_its_bf16_export():
    master = torch.randn(8, 64)
    quantiser = FakeQuant(RCEIL)
    values = quantiser(master)
    assert values.dtype == torch.bfloat16
    assert torch.equal(values, unpack(pack(master.bfloat16(), RCEIL)))
    assert torch.equal(unpack(quantiser.packed(master)), values)


def test_the_qdq_is_computed_once_per_optimizer_step(monkeypatch):
    module = sys.modules["consistency.quant.qdq"]
    calls = []
    real = module.qdq
    monkeypatch.setattr(module, "qdq", lambda *a, **k: calls.append(1) or real(*a, **k))
    weight = nn.Parameter(torch.randn(8, 64))
    quantiser = FakeQuant(RCEIL)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    for step in range(3):
        for _ in range(4):
            quantiser(weight).sum().backward()
        assert len(calls) == step + 1
        optimizer.step()
    assert torch.equal(quantiser(weight), qdq(weight, RCEIL).bfloat16())
    with torch.no_grad():
        weight.data.copy_(torch.ones(8, 64))
    quantiser.forget()
    assert torch.equal(quantiser(weight), torch.ones(8, 64, dtype=torch.bfloat16))


def test_main_grad_receives_the_fp32_gradient_of_the_qdq_weight():
    x, grad = torch.randn(5, 64).bfloat16(), torch.randn(5, 8).bfloat16()
    weight = nn.Parameter(torch.randn(8, 64).bfloat16())
    weight.main_grad = torch.ones(8, 64)  # type: ignore[attr-defined]
    y = kernels.linear(x, FakeQuant(RCEIL)(weight))
    y.backward(grad)
    assert weight.grad is None
    product = kernels.linear(grad.t(), x.t(), out_dtype=torch.float32)
    assert torch.equal(weight.main_grad, 1 + product)  # type: ignore[attr-defined]
    assert torch.equal(y, kernels.linear(x, qdq(weight, RCEIL)))
    with pytest.raises(UnsupportedError, match="main_grad"):
        FakeQuant(RCEIL, gradient="clipped")(weight)


def test_targets_are_experts_or_linears_and_exclusions_are_exact_names(model):
    experts = [f"{i}.experts.{name}" for i in (0, 1) for name in ("gate_up_proj", "down_proj")]
    assert list(quantise_modules(model, RCEIL)) == experts
    with pytest.raises(InvalidInputError, match="quantised already"):
        quantise_modules(model, RCEIL)
    restore_modules(model)
    # `gate` names the router alone: gate_up_proj keeps its own name, whatever it begins with.
    found = quantise_modules(
        model,
        RCEIL,
        targets="linears",
        exclude=("0.gate", "1.gate", "1.q_proj", "1.experts.down_proj"),
    )
    linears = ["0.q_proj.weight", "0.gate_up_proj.weight", "1.gate_up_proj.weight"]
    assert sorted(found) == sorted([*linears, *experts[:3]])
    restore_modules(model)
    with pytest.raises(InvalidInputError, match=r"exclude names '0\.gat'"):
        quantise_modules(model, RCEIL, exclude=("0.gat",))
    with pytest.raises(InvalidInputError, match="nothing to quantise"):
        quantise_modules(model[0].q_proj, RCEIL)
    with pytest.raises(InvalidInputError, match="targets is 'all'"):
        quantise_modules(model, RCEIL, targets="all")  # type: ignore[arg-type]


def test_a_quantised_module_trains_its_own_parameter_and_restores_it(model):
    linear = model[0].q_proj
    original = linear.weight
    quantise_modules(model, RCEIL, targets="linears", out_dtype=torch.float32)
    assert torch.equal(linear.weight, qdq(original, RCEIL))
    linear(torch.ones(2, 32)).sum().backward()
    assert torch.equal(original.grad, torch.full((64, 32), 2.0))
    restore_modules(model)
    assert linear.weight is original


def test_a_weight_that_cannot_be_quantised_leaves_the_model_unchanged(model):
    model[1].experts.down_proj.data[0, 3, 5] = float("nan")
    with pytest.raises(InvalidInputError, match=r"1.experts.down_proj\[0, 3, 5\] is nan"):
        quantise_modules(model, RCEIL)
    assert not any(isinstance(module, FakeQuant) for module in model.modules())
    model[0].experts.is_transposed = True
    with pytest.raises(InvalidInputError, match="contraction axis first"):
        quantise_modules(model, RCEIL)


def test_a_trained_models_weights_are_packed_as_it_computes_with_them(model, tmp_path):
    names = quantise_modules(model, RCEIL, targets="linears", exclude=("0.gate", "1.gate"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].q_proj(torch.ones(2, 32).bfloat16()).sum().backward()
    optimizer.step()
    weights = packed_weights(model)
    values = {name: model.get_parameter(name) for name in ("0.gate.weight", "0.gate_up_proj.bias")}
    assert all(torch.equal(weights[name], value) for name, value in values.items())  # type: ignore[arg-type]
    assert {name for name, weight in weights.items() if isinstance(weight, PackedTensor)} == set(
        names
    )
    export_checkpoint(tmp_path / "out", weights, {}, layout=CheckpointLayout.COMPRESSED_TENSORS)
    with CheckpointReader(tmp_path / "out") as served:
        found = unpack(served.packed("0.q_proj.weight"))
        expert = unpack(served.packed("1.experts.2.down_proj.weight"))
    assert torch.equal(found, model[0].q_proj.weight)
    assert torch.equal(expert, model[1].experts.down_proj[2])
    assert not torch.equal(found, unpack(pack(torch.zeros(64, 32), RCEIL)))
    restore_modules(model)
    with pytest.raises(InvalidInputError, match="has no FakeQuant"):
        packed_weights(model)
    alone = model[0].q_proj
    quantise_modules(alone, RCEIL, targets="linears")
    assert list(packed_weights(alone)) == ["weight"]
    restore_modules(alone)
    nn.utils.parametrize.register_parametrization(model[0].q_proj, "weight", nn.Identity())
    with pytest.raises(InvalidInputError, match=r"0.q_proj.weight has the parametrizations"):
        packed_weights(model)


def test_packed_and_dense_weights_of_equal_values_give_equal_bits():
    x = torch.randn(9, 64).bfloat16()
    gate_up, down = pack(torch.randn(4, 128, 64), RCEIL), pack(torch.randn(4, 64, 64), RCEIL)
    weights, ids = kernels.route(torch.randn(9, 4), 2, normalise=True)
    dense = unpack(gate_up), unpack(down)
    expected = quantised_moe_experts(x, *dense, weights, ids)
    for pair in ((gate_up, down), (gate_up, dense[1]), (dense[0], down)):
        assert torch.equal(quantised_moe_experts(x, *pair, weights, ids), expected)
    weight = pack(torch.randn(40, 64), RCEIL)
    assert torch.equal(quantised_linear(x, weight), quantised_linear(x, unpack(weight)))


def test_a_block_never_crosses_a_tensor_parallel_boundary():
    # 2880 over 4 ranks is 22.5 blocks each.
    with pytest.raises(InvalidInputError, match="cuts a block of 32"):
        shard_blocks(2880, 4)
    shards = shard_blocks(2880, 4, pad=True)
    assert {shard.extent for shard in shards} == {736}
    assert [shard.padding for shard in shards] == [0, 0, 0, 64]
    weight = torch.randn(6, 2880)
    whole = pack(weight, RCEIL)
    pieces = []
    for shard in shards:
        part = torch.nn.functional.pad(weight[:, shard.start : shard.stop], (0, shard.padding))
        pieces.append(pack(part, RCEIL).scales[:, : (shard.stop - shard.start) // 32])
    assert torch.equal(torch.cat(pieces, 1), whole.scales)
    assert [s.extent for s in shard_blocks(4096, 8)] == [512] * 8
    for width, ranks in ((33, 1), (64, 0)):
        with pytest.raises(InvalidInputError):
            shard_blocks(width, ranks)
