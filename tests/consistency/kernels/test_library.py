from __future__ import annotations

import shutil

import pytest

from consistency.errors import KernelLibraryError
from consistency.kernels import library


def test_the_best_runnable_variant_is_loaded():
    variants = library.runnable_variants()
    assert variants[-1] == "baseline"
    assert library.library() is library.load_variant(variants[0])


def test_a_missing_library_says_how_to_build_it():
    with pytest.raises(
        KernelLibraryError, match=r"_kernels_absent.so does not exist.*pip install -e"
    ):
        library.load_variant("absent")


def test_a_damaged_library_says_how_to_build_it(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "variant_path", lambda variant: tmp_path / f"{variant}.so")
    (tmp_path / "damaged.so").write_bytes(b"not a library")
    with pytest.raises(KernelLibraryError, match=r"cannot load .*damaged.so.*build_ext"):
        library.load_variant("damaged")


def test_a_library_of_another_revision_is_refused(tmp_path, monkeypatch):
    shutil.copy(library.variant_path("baseline"), tmp_path / "stale.so")
    monkeypatch.setattr(library, "variant_path", lambda variant: tmp_path / f"{variant}.so")
    monkeypatch.setattr(library, "REVISION", library.REVISION + 1)
    with pytest.raises(KernelLibraryError, match="kernel revision"):
        library.load_variant("stale")


def test_an_unknown_function_is_named():
    with pytest.raises(KernelLibraryError, match="no lockstep_absent"):
        library.Kernel("lockstep_absent")()


def test_a_failed_allocation_becomes_a_memory_error(monkeypatch):
    kernel = library.Kernel("lockstep_gemm", library.POINTER)
    monkeypatch.setattr(kernel, "_function", lambda *_: 1)
    with pytest.raises(MemoryError, match="lockstep_gemm"):
        kernel(None)
