from __future__ import annotations

import pytest
import torch

from consistency.errors import UnsupportedError
from consistency.kernels import _dispatch, join_partials, linear, rms_norm
from consistency.kernels._dispatch import interpreted, on_triton


def test_a_cpu_tensor_runs_the_cpu_kernels_unless_it_is_interpreted():
    x = torch.zeros(1)
    assert not on_triton(x)
    with interpreted():
        with interpreted():
            assert on_triton(x)
        assert on_triton(x)
    assert not on_triton(x)


def test_an_exception_leaves_the_scope_clean():
    with pytest.raises(KeyError):
        with interpreted():
            raise KeyError
    assert not on_triton(torch.zeros(1))


def test_tensors_on_two_devices_are_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"weight is on meta"):
        rms_norm(torch.zeros(2, 4), torch.zeros(4, device="meta"), 1e-6)
    with pytest.raises(UnsupportedError, match=r"partials\[1\] is on meta"):
        join_partials([torch.zeros(1), torch.zeros(1, device="meta")])


def test_a_sparse_tensor_is_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"weight has layout torch\.sparse_coo"):
        linear(torch.zeros(2, 4), torch.eye(4).to_sparse())


def test_without_triton_a_gpu_tensor_says_what_to_install(monkeypatch):
    def absent(name: str) -> None:
        raise ModuleNotFoundError("No module named 'triton'", name="triton")

    monkeypatch.setattr(_dispatch.importlib, "import_module", absent)
    with pytest.raises(UnsupportedError, match="pip install 'triton"):
        _dispatch.triton_kernels("absent")
