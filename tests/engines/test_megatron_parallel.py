"""Two gloo ranks of Megatron-Core, in every way that they can share a model, against one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file

from consistency import NumericsContract
from integrations.errors import EngineConfigError
from integrations.megatron.layout import ranks_layout
from integrations.megatron.weights import Place, parameter_pieces
from integrations.trainer.model.checkpoint import load_checkpoint
from integrations.trainer.model.config import ModelConfig
from integrations.trainer.model.weights import checkpoint_parts
from weightplane import Layout, TensorSpec
from weightplane.cluster_layout import ClusterLayout
from weightplane.execute import execute
from weightplane.plan import plan

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).with_name("megatron_ranks.py")
WAYS = [
    *(("dense", case) for case in ("tp", "sp", "pp")),
    *(("moe", case) for case in ("tp", "sp", "pp", "ep", "sp-ep")),
]


@pytest.fixture(scope="module")
def folders(checkpoint) -> dict[str, Path]:
    return {name: checkpoint(f"{name} for two ranks") for name in ("dense", "moe")}


@pytest.fixture(scope="module")
def found(folders, tmp_path_factory):
    """{(model, case, rank): the tensors that the rank wrote}."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(PROGRAM), str(folder), *map(str, folders.values())],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        errors = process.communicate(timeout=240)[1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors
    return {
        tuple(path.name.split(".")): load_file(path)
        for path in folder.iterdir()
        if not path.name.startswith("store")
    }


def both(found, name: str, case: str):
    """What one process found, and each of the two ranks."""
    return found[name, "alone", "0"], [found[name, case, rank] for rank in ("0", "1")]


def part(tensors, name: str) -> dict[str, torch.Tensor]:
    prefix = f"{name}."
    return {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}


@pytest.mark.parametrize("what", ["logprobs", "routes", "replayed", "used"])
@pytest.mark.parametrize("name, case", WAYS)
def test_every_rank_has_the_bits_of_one_process(found, name, case, what):
    alone, ranks = both(found, name, case)
    expected = part(alone, what)
    assert bool(expected) == (name == "moe" or what == "logprobs")
    for rank, tensors in enumerate(ranks):
        own = part(tensors, what)
        assert own.keys() == expected.keys()
        for index in expected:
            # Under expert parallelism rank 1 has the sequences in the opposite order.
            mine = str(len(own) - 1 - int(index)) if case == "ep" and rank else index
            assert torch.equal(own[mine], expected[index]), (rank, index)


@pytest.mark.parametrize("name, case", [way for way in WAYS if way[1] in ("tp", "sp", "sp-ep")])
def test_the_loss_of_every_rank_is_minus_the_logprob(found, name, case):
    alone, ranks = both(found, name, case)
    for tensors in (alone, *ranks):
        for index, logprobs in part(alone, "logprobs").items():
            assert torch.equal(-tensors["loss"][int(index), : len(logprobs)], logprobs)


@pytest.mark.parametrize("case", ["tp", "sp", "pp", "ep", "sp-ep"])
def test_stock_megatron_core_is_sent_to_the_traced_experts(found, case):
    alone, ranks = both(found, "moe", case)
    for tensors in ranks:
        traced, used = part(tensors, "used"), part(tensors, "stock.used")
        for index, ids in used.items():
            routed = torch.arange(len(ids)) != 3  # that token has no trace: the live router
            assert torch.equal(ids[routed], traced[index][routed])
    assert len(part(alone, "stock.used")) == 4


def whole(gradients, shape: ModelConfig, place: Place) -> dict[str, torch.Tensor]:
    """Pieces of a rank's gradients by the checkpoint tensor and the box that they belong to."""
    return {
        f"{piece.tensor} {piece.start} {piece.shape}": gradients[name][
            piece.row : piece.row + piece.shape[0]
        ]
        for name, pieces in parameter_pieces(shape, place).items()
        for piece in pieces
    }


def box_of(tensors: dict[str, torch.Tensor], name: str, start, shape) -> torch.Tensor:
    """A box of a gradient that one process holds in pieces along its rows."""
    for key, value in tensors.items():
        tensor, _, rest = key.partition(" ")
        begin = tuple(int(n) for n in rest[1 : rest.index(")")].split(",") if n.strip())
        offset = [s - b for s, b in zip(start, begin, strict=False)]
        fits = all(
            o >= 0 and o + n <= m for o, n, m in zip(offset, shape, value.shape, strict=False)
        )
        if tensor == name and fits:
            return value[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
    raise AssertionError(name)


@pytest.mark.parametrize("name, case", [way for way in WAYS if way[1] in ("tp", "sp", "sp-ep")])
def test_gradients_of_two_tensor_parallel_ranks_are_those_of_one(found, folders, name, case):
    alone, ranks = both(found, name, case)
    shape = ModelConfig.load(folders[name])
    expected = whole(part(alone, "grad"), shape, Place())
    partial: dict[str, list[torch.Tensor]] = {}
    for rank, tensors in enumerate(ranks):
        place = places(case)[rank]
        grads = part(tensors, "grad")
        for parameter, pieces in parameter_pieces(shape, place).items():
            for piece in pieces:
                got = grads[parameter][piece.row : piece.row + piece.shape[0]]
                want = box_of(expected, piece.tensor, piece.start, piece.shape)
                # Each rank saw its own heads or tokens; Megatron-Core adds these up after the pass.
                head_norm = piece.tensor.endswith(("q_norm.weight", "k_norm.weight"))
                shared = "norm" in piece.tensor or piece.tensor.endswith("mlp.gate.weight")
                if head_norm or (shared and case != "tp"):
                    partial.setdefault(piece.tensor, []).append(got)
                else:
                    assert torch.equal(got, want), (rank, piece)
    for tensor, parts in partial.items():
        (want,) = [value for key, value in expected.items() if key.startswith(f"{tensor} ")]
        total = parts[0].float() + parts[1].float()
        assert torch.allclose(total, want.float(), rtol=0.05, atol=0.05 * float(want.abs().max()))


def places(case: str) -> list[Place]:
    """Where the two ranks of a case stand."""
    tensor, pipeline = case in ("tp", "sp", "sp-ep"), case == "pp"
    expert, split = case in ("ep", "sp-ep"), case in ("tp", "sp")
    return [
        Place(
            tensor_rank=rank * tensor,
            tensor_size=1 + tensor,
            pipeline_rank=rank * pipeline,
            pipeline_size=1 + pipeline,
            expert_rank=rank * expert,
            expert_size=1 + expert,
            expert_tensor_rank=rank * split,
            expert_tensor_size=1 + split,
        )
        for rank in (0, 1)
    ]


@pytest.mark.parametrize("name, case", WAYS)
def test_two_ranks_fill_an_engine_without_gathering(found, folders, name, case):
    """Each rank wrote its own arena; a plan moves their slices into a whole copy of the model."""
    _, weights = load_checkpoint(folders[name])
    shape = ModelConfig.load(folders[name])
    values = {
        part.name: part.of(weights[stack])
        for stack, parts in checkpoint_parts(shape).items()
        for part in parts
    }
    source = ranks_layout(shape, dict(zip(("trainer/0", "trainer/1"), places(case), strict=True)))
    arenas = [found[name, case, rank]["arena"].numpy() for rank in ("0", "1")]
    whole = Layout.whole(TensorSpec.of(key, value) for key, value in values.items())
    destination = ClusterLayout.of_layouts({"engine": whole})
    landed = [numpy.zeros(int(destination.arena_bytes[0]), numpy.uint8)]
    made = plan(source, destination)
    execute(made, arenas, landed)
    for storage, shard in zip(destination.storages(0), whole.shards, strict=True):
        piece = landed[0][storage.offset : storage.offset + storage.byte_count].copy()
        got = torch.from_numpy(piece).view(torch.bfloat16).view(shard.shape)
        assert torch.equal(got, values[shard.tensor]), shard.tensor


@pytest.mark.parametrize("case", ["tp", "sp", "ep", "sp-ep"])
def test_gradients_reach_the_router_under_replay(found, case):
    for tensors in both(found, "moe", case)[1]:
        grads = part(tensors, "replay")
        assert len(grads) == 4
        assert all(float(grad.abs().max()) > 0 for grad in grads.values())


def test_a_pipelined_step_with_replay_and_recompute_has_the_gradients_of_one_process(
    found, folders
):
    alone, ranks = both(found, "moe", "pp")
    shape = ModelConfig.load(folders["moe"])
    expected = whole(part(alone, "step.grad"), shape, Place())
    for rank, tensors in enumerate(ranks):
        place = Place(pipeline_rank=rank, pipeline_size=2)
        for key, got in whole(part(tensors, "step.grad"), shape, place).items():
            assert torch.equal(got, expected[key]), key
    assert all(bool(value.abs().max() > 0) for key, value in expected.items() if "gate.w" in key)


def test_a_rank_that_fails_is_named_in_one_line(tmp_path):
    from integrations.megatron.ranks import score_on_ranks

    with pytest.raises(
        EngineConfigError, match=r"a rank of Megatron-Core failed: .*does not exist"
    ):
        score_on_ranks(str(tmp_path / "none"), [], None, ranks=2, contract=NumericsContract())


def test_widths_that_the_contract_does_not_cut_are_refused(checkpoint):
    from integrations.megatron.ranks import score_on_ranks

    # 64 features of an expert are one granule of the contract: two ranks have no tree for it.
    with pytest.raises(EngineConfigError, match="moe_ffn_hidden_size is 64, which the contract"):
        score_on_ranks(
            str(checkpoint("moe")),
            [],
            ["linear"],
            ranks=2,
            contract=NumericsContract(tp_invariant=True),
        )
