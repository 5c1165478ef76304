"""Layouts recorded from loaders: a toy engine with everything that engines do to weights."""

from __future__ import annotations

import numpy
import pytest
import torch

from weightplane.cluster_layout import ClusterLayout
from weightplane.errors import RecordingError
from weightplane.execute import execute
from weightplane.layout import Layout, TensorSpec
from weightplane.plan import PlanSettings, plan
from weightplane.recorder import record_load

HIDDEN, HEADS, KV_HEADS, HEAD, INNER, EXPERTS, VOCABULARY = 16, 8, 2, 4, 24, 4, 50


def weights(seed):
    """What a trainer holds, as bf16 with an fp32 router."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape):
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    state = {
        "embed": matrix(VOCABULARY, HIDDEN),
        "q.weight": matrix(HEADS * HEAD, HIDDEN),
        "k.weight": matrix(KV_HEADS * HEAD, HIDDEN),
        "v.weight": matrix(KV_HEADS * HEAD, HIDDEN),
        "q.bias": matrix(HEADS * HEAD),
        "k.bias": matrix(KV_HEADS * HEAD),
        "v.bias": matrix(KV_HEADS * HEAD),
        "o.weight": matrix(HIDDEN, HEADS * HEAD),
        "router": torch.randn((EXPERTS, HIDDEN), generator=generator),
        "norm": matrix(HIDDEN),
        "a.weight": matrix(3, HIDDEN),
        "b.weight": matrix(5, HIDDEN),
        "conv": matrix(6, 1, 4),
    }
    for expert in range(EXPERTS):
        state[f"experts.{expert}.gate"] = matrix(INNER, HIDDEN)
        state[f"experts.{expert}.up"] = matrix(INNER, HIDDEN)
        state[f"experts.{expert}.down"] = matrix(HIDDEN, INNER)
    return state


class ToyEngine:
    """One tensor-parallel rank with fused, stacked, transposed, interleaved and padded tensors."""

    def __init__(self, rank, size, device):
        self.rank, self.size = rank, size
        rows = -(-VOCABULARY // (8 * size)) * 8
        self.q, self.kv = HEADS * HEAD // size, max(1, KV_HEADS // size) * HEAD
        inner = INNER // size

        def empty(*shape, dtype=torch.bfloat16):
            return torch.full(shape, 7.0, dtype=dtype, device=device)

        self.parameters = {
            "embed": empty(rows, HIDDEN),
            "qkv.weight": empty(self.q + 2 * self.kv, HIDDEN),
            "qkv.bias": empty(self.q + 2 * self.kv),
            "o": empty(HIDDEN, HEADS * HEAD // size),
            "router": empty(EXPERTS, HIDDEN, dtype=torch.float32),
            "norm": empty(HIDDEN),
            "ab": empty(8, HIDDEN),
            "conv": empty(6, 4),
            "w13": empty(EXPERTS, 2 * inner, HIDDEN),
            "w2": empty(EXPERTS, inner, HIDDEN),
        }

    def load(self, pairs):
        kept = {}
        for name, loaded in pairs:
            if name == "embed":
                rows = self.parameters["embed"].shape[0]
                shard = loaded[self.rank * rows : (self.rank + 1) * rows]
                self.parameters["embed"][: shard.shape[0]].copy_(shard)
                self.parameters["embed"][shard.shape[0] :].zero_()
            elif name[:2] in ("q.", "k.", "v."):
                self.load_qkv(name, loaded)
            elif name == "o.weight":
                width = self.parameters["o"].shape[1]
                self.parameters["o"].copy_(loaded.narrow(1, self.rank * width, width))
            elif name in ("a.weight", "b.weight"):
                kept[name] = loaded
                if len(kept) == 2:
                    both = torch.cat([kept["a.weight"], kept["b.weight"]])
                    self.parameters["ab"].data.copy_(both.contiguous())
            elif name == "conv":
                self.parameters["conv"].copy_(loaded.squeeze(1).clone())
            elif name.startswith("experts."):
                _, expert, kind = name.split(".")
                self.load_expert(expert, kind, loaded)
            else:
                self.parameters[name].copy_(loaded)

    def load_qkv(self, name, loaded):
        part, _, kind = name.partition(".")
        fused = self.parameters[f"qkv.{kind}"]
        size, begin = (self.q, 0) if part == "q" else (self.kv, self.q + (part == "v") * self.kv)
        # Ranks beyond the number of key-value heads hold the same head as their neighbour.
        shard = self.rank if part == "q" else self.rank * KV_HEADS // max(self.size, KV_HEADS)
        fused.narrow(0, begin, size).copy_(loaded.narrow(0, shard * size, size))

    def load_expert(self, expert, kind, loaded):
        expert = int(expert)
        inner = INNER // self.size
        if kind == "down":
            # The engine keeps w2 transposed.
            shard = loaded.t()[self.rank * inner : (self.rank + 1) * inner]
            self.parameters["w2"][expert].copy_(shard)
        else:
            # Gate and up rows alternate.
            shard = loaded.chunk(self.size)[self.rank]
            self.parameters["w13"][expert][(kind == "up") :: 2].copy_(shard)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_a_plan_delivers_equals_what_the_engines_own_loader_loads(size, device):
    state = weights(size)
    specs = [TensorSpec.of(name, tensor) for name, tensor in state.items()]
    ranks = []
    for rank in range(size):
        engine = ToyEngine(rank, size, device)
        before = {name: tensor.clone() for name, tensor in engine.parameters.items()}
        recording = record_load(engine.load, specs, engine.parameters)
        assert recording.unused == ()
        if device == "cpu":
            assert all(torch.equal(before[name], engine.parameters[name]) for name in before)
        ranks.append(recording.rank_layout(f"rollout/{rank}"))
    destination = ClusterLayout.build(specs, ranks)
    layout = Layout.of(state)
    source = ClusterLayout.of_layouts({"trainer": layout})
    held = torch.zeros(layout.size, dtype=torch.uint8)
    for name, view in layout.views(held).items():
        view.copy_(state[name])
    arenas = [numpy.full(int(count), 0xAA, numpy.uint8) for count in destination.arena_bytes]
    execute(plan(source, destination, PlanSettings(chunk_bytes=256)), [held.numpy()], arenas)
    for rank in range(size):
        engine = ToyEngine(rank, size, "cpu")
        engine.load(iter(state.items()))
        for storage in destination.storages(rank):
            expected = engine.parameters[storage.name].reshape(-1).view(torch.uint8).numpy()
            arrived = arenas[rank][storage.offset : storage.offset + storage.byte_count]
            assert numpy.array_equal(arrived, expected), storage.name


def one(load, spec=None, shape=(4, 4), padded=()):
    spec = spec or TensorSpec("w", (4, 4), "float32")
    parameter = torch.zeros(shape)
    return record_load(
        lambda pairs: load(parameter, dict(pairs)["w"]), [spec], {"p": parameter}, padded
    )


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (lambda p, w: p.copy_(w * 2), "computes aten.mul.Tensor with 'w'"),
        (lambda p, w: p.copy_(w.t() + 0), "computes aten.add.Tensor with 'w'"),
        (lambda p, w: p.add_(w), "changes parameter 'p' by aten.add_"),
        (lambda p, w: p.fill_(1.0), "changes parameter 'p' by aten.fill_"),
        (lambda p, w: p[:2].copy_(w[:2]), "leaves 32 of 64 bytes of parameter 'p' unloaded"),
        (lambda p, w: None, "leaves 64 of 64 bytes"),
        (lambda p, w: p.copy_(torch.ones(4, 4)), "fills parameter 'p' with a tensor that is no"),
        (lambda p, w: p.copy_(w.to(torch.bfloat16)), "float32 to torch.bfloat16"),
    ],
)
def test_what_is_no_copy_of_a_slice_is_refused(load, reason):
    with pytest.raises(RecordingError, match=reason):
        one(load)


def test_a_router_that_the_engine_keeps_in_another_dtype_is_refused_by_name():
    with pytest.raises(RecordingError, match=r"'p' is torch.float32, but 'w' is offered as .*bfl"):
        one(lambda p, w: p.copy_(w), TensorSpec("w", (4, 4), "bfloat16"))


def test_elements_that_the_engine_pads_must_be_named():
    recording = one(lambda p, w: p[:4].copy_(w), shape=(6, 4), padded=["p"])
    assert recording.storages[0].padding_bytes == 32
    with pytest.raises(RecordingError, match="which are no parameters"):
        one(lambda p, w: p.copy_(w), padded=["q"])


def test_a_weight_that_nobody_loads_is_reported():
    specs = [TensorSpec("w", (4,), "float32"), TensorSpec("extra", (2,), "float32")]
    parameter = torch.zeros(4)
    recording = record_load(
        lambda pairs: parameter.copy_(dict(pairs)["w"]), specs, {"p": parameter}
    )
    assert recording.unused == ("extra",)
    assert [spec.name for spec in recording.tensors] == ["w"]


def test_a_parameter_whose_data_is_replaced_holds_the_weight():
    parameter = torch.nn.Parameter(torch.empty(4, 4, device="meta"))

    def load(pairs):
        for _, loaded in pairs:
            parameter.data = loaded.t()

    recording = record_load(load, [TensorSpec("w", (4, 4), "float32")], {"p": parameter})
    assert [piece.strides for piece in recording.slices] == [(4, 16)]
