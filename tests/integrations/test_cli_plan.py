"""`lockstep plan`: files, built-in layouts, pictures, and what it refuses."""

from __future__ import annotations

import json

import pytest

from integrations.cli import main
from integrations.cli_plan import read_side
from weightplane.cluster_layout import ClusterLayout
from weightplane.layout import Layout, TensorSpec
from weightplane.plan import Plan

SMALL = (
    "layers=2,experts=4,hidden=128,intermediate=128,heads=2,query_rank=128,key_value_rank=128,"
    "rope=32,head=32,vocabulary=256"
)
TRAINER = f"moe-1t/trainer:pipeline=2,expert=2,{SMALL}"
ROLLOUT = f"moe-1t/rollout:tensor=2,expert=2,replicas=2,{SMALL}"


def test_built_in_layouts_are_planned_simulated_drawn_and_saved(tmp_path, capsys):
    files = [tmp_path / name for name in ("plan.json", "result.json", "schedule.png")]
    options = zip(("--save", "--json", "--png"), map(str, files), strict=True)
    arguments = ["plan", "--from", TRAINER, "--to", ROLLOUT, "--chunk-mib", "0.0625"]
    assert main([*arguments, *(part for pair in options for part in pair)]) == 0
    assert "1.0000 x the minimum" in capsys.readouterr().out
    result = json.loads(files[1].read_text())
    assert result["wire_bytes"] == result["minimum_bytes"] > 0
    assert result["egress_bytes"] == result["minimum_egress_bytes"]
    assert 0 < result["bandwidth_fraction"] <= 1
    assert (result["source_ranks"], result["destination_ranks"]) == (4, 8)
    assert sum(rank["sent"] for rank in result["ranks"]) == result["wire_bytes"]
    assert Plan.from_json(files[0].read_bytes()).digest == result["digest"]
    assert files[2].read_bytes().startswith(b"\x89PNG")


def test_layout_files_are_read(tmp_path, capsys):
    layout = Layout.whole([TensorSpec("w", (8, 8), "bfloat16")])
    for name in ("trainer", "rollout"):
        side = ClusterLayout.of_layouts({name: layout})
        (tmp_path / f"{name}.json").write_bytes(side.to_json())
        assert read_side("--from", str(tmp_path / f"{name}.json")) == side
    arguments = ["--from", str(tmp_path / "trainer.json"), "--to", str(tmp_path / "rollout.json")]
    assert main(["plan", *arguments]) == 0
    assert "1 trainer to 1 rollout" in capsys.readouterr().out


def test_without_relays_the_trainer_sends_every_replica_its_copy(tmp_path):
    file = tmp_path / "result.json"
    arguments = ["plan", "--from", TRAINER, "--to", ROLLOUT, "--no-relay", "--json", str(file)]
    assert main(arguments) == 0
    result = json.loads(file.read_text())
    assert result["egress_bytes"] == result["wire_bytes"] == result["minimum_bytes"]


@pytest.mark.parametrize(
    ("source", "destination", "reason"),
    [
        ("nowhere.json", ROLLOUT, "nowhere.json: cannot be read (No such file or directory)"),
        ("moe-1t-int4/trainer", ROLLOUT, "no built-in layout 'int4' / 'trainer'"),
        ("moe-1t/learner", ROLLOUT, "no built-in layout 'bf16' / 'learner'"),
        (TRAINER + ",stages=2", ROLLOUT, "'stages=2' is not KEY=NUMBER"),
        (TRAINER + ",layers=two", ROLLOUT, "'layers=two' is not KEY=NUMBER"),
        ("moe-1t/trainer:expert=7", ROLLOUT, "experts is 384, which expert = 7 does not divide"),
        (TRAINER.replace("moe-1t", "moe-1t-fp8"), ROLLOUT, "is float8_e4m3fn"),
        (TRAINER.replace("layers=2", "layers=3"), ROLLOUT, "wanted by nobody"),
    ],
)
def test_bad_input_ends_with_one_line_and_code_2(source, destination, reason, capsys):
    assert main(["plan", "--from", source, "--to", destination]) == 2
    error = capsys.readouterr().err
    assert reason in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--chunk-mib", "0", "chunk_bytes is 0"),
        ("--nic-gbps", "0", "nic_bytes_per_second is 0.0"),
        ("--ranks-per-host", "0", "ranks_per_host is 0"),
        ("--png", "/nowhere/plan.png", "the folder /nowhere does not exist"),
    ],
)
def test_a_bad_option_is_named(option, value, reason, capsys):
    assert main(["plan", "--from", TRAINER, "--to", ROLLOUT, option, value]) == 2
    assert reason in capsys.readouterr().err


def test_both_sides_are_required(capsys):
    assert main(["plan", "--to", ROLLOUT]) == 2
    assert "--from" in capsys.readouterr().err
