"""`lockstep bench sync` really moves, verifies and reports; bad input is one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from bench import sync
from bench.sync_models import MODELS, Learner, changed_bytes
from integrations.cli import main
from weightplane import TensorSpec

ROOT = Path(__file__).parents[2]


def test_the_models_have_the_sizes_that_are_reported():
    sizes = {name: sum(spec.byte_count for spec in specs()) for name, specs in MODELS.items()}
    assert sizes["dense"] == 269_030_016
    assert 200e6 < sizes["moe"] < 350e6


def test_a_step_changes_about_one_weight_in_forty_and_what_it_changes_is_counted():
    learner = Learner([TensorSpec("a", (512, 576), "bfloat16")], 1e-6)
    before = learner.state()
    learner.step()
    size, share = changed_bytes(before, learner.state())
    assert 0 < share < 0.1
    assert size == 2 * int((before["a"] != learner.state()["a"]).sum())


def test_full_and_delta_rows_have_the_promised_keys(monkeypatch, tmp_path):
    monkeypatch.setitem(
        MODELS,
        "dense",
        lambda: [TensorSpec(f"layer.{index}", (256, 512), "bfloat16") for index in range(8)],
    )
    options = sync.parser().parse_args(
        ["--models", "dense", "--transports", "shm", "--replicas", "1", "--versions", "1",
         "--peers", ""]
    )  # fmt: skip
    rows = sync.run(options, Console(quiet=True))
    assert [row["mode"] for row in rows] == ["full", "delta"]
    keys = {"peer", "transport", "bytes", "minimum_bytes", "seconds", "pause_seconds",
            "bandwidth_fraction", "version"}  # fmt: skip
    assert all(keys <= row.keys() for row in rows)
    full, delta = rows
    assert full["bytes"] == full["minimum_bytes"] == 8 * 256 * 512 * 2
    assert delta["minimum_bytes"] < delta["bytes"] < full["bytes"] / 4
    sync.show(rows, Console(quiet=True))
    from bench.sync_plot import save_plot

    save_plot(rows, tmp_path / "sync.png")
    assert (tmp_path / "sync.png").stat().st_size > 1000
    json.dumps(rows)


@pytest.mark.parametrize("given", [["--transports", "pigeon"], ["--replicas", "0"]])
def test_bad_options_are_refused(given):
    with pytest.raises(SystemExit):
        sync.main(given)


def test_the_command_line_passes_options_on_and_knows_what_there_is(capfd):
    assert main(["bench", "pigeons"]) == 2
    assert "there is no bench 'pigeons'" in capfd.readouterr().err
    done = subprocess.run(
        [sys.executable, "-m", "integrations.cli", "bench", "sync", "--help"],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0
    assert "--transports" in done.stdout
    assert torch.get_num_threads() >= 1
