from __future__ import annotations

import json

import torch
from typer.testing import CliRunner

from consistency import kernels
from integrations import doctor_kernels
from integrations.cli import app


def test_every_kernel_keeps_its_bits_here(tmp_path):
    target = tmp_path / "kernels.json"
    result = CliRunner().invoke(app, ["doctor", "--kernels", "--json", str(target)])
    assert result.exit_code == 0, result.output
    assert "0 failed" in result.output
    found = json.loads(target.read_text())
    assert found["passed"]
    assert {"linear", "softmax", "moe_experts"} <= {c["operation"] for c in found["checks"]}


def test_a_kernel_that_follows_the_batch_fails_and_the_exit_code_says_so(monkeypatch):
    def careless(x):
        return kernels.softmax(x) + (1.0 if len(x) > 20 else 0.0)

    x = torch.ones(doctor_kernels.ROWS, 8)
    case = ("careless", "8", x, careless)
    monkeypatch.setattr(doctor_kernels, "_operations", lambda: iter([case]))
    threads = torch.get_num_threads()
    (check,) = doctor_kernels.check_kernels()
    assert not check.passed
    assert any("1 rows from 0" in failure for failure in check.failures)
    assert torch.get_num_threads() == threads
    result = CliRunner().invoke(app, ["doctor", "--kernels"])
    assert result.exit_code == 1
    assert "NO" in result.output
