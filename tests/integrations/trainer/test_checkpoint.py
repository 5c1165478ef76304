from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from integrations.errors import CheckpointError
from integrations.trainer.checkpoint import (
    STATE,
    TENSORS,
    Groups,
    checkpoint_versions,
    load_state,
    prune,
    save_state,
)


def groups(seed: int = 0) -> Groups:
    generator = torch.Generator().manual_seed(seed)
    names = ("model.layers.0.mlp.gate.weight", "lm_head.weight", "empty")
    shapes = ((4, 3), (7, 2), (0, 3))
    return {
        group: {
            name: torch.randn(shape, generator=generator).to(dtype)
            for name, shape in zip(names, shapes, strict=True)
        }
        for group, dtype in (("master", torch.float32), ("weights", torch.bfloat16))
    }


def assert_equal(left: Groups, right: Groups) -> None:
    assert {g: set(t) for g, t in left.items()} == {g: set(t) for g, t in right.items()}
    for group, tensors in left.items():
        for name, tensor in tensors.items():
            assert tensor.dtype == right[group][name].dtype
            assert torch.equal(tensor, right[group][name])


def test_a_checkpoint_reads_back_bit_for_bit(tmp_path: Path) -> None:
    saved = groups()
    path = save_state(tmp_path, 12, saved, {"optimizer_steps": 12, "note": "é"})
    assert path.name == "version-000012"
    loaded, facts = load_state(tmp_path, 12)
    assert_equal(saved, loaded)
    assert (facts["optimizer_steps"], facts["note"], facts["version"]) == (12, "é", 12)


def test_views_of_one_buffer_and_transposed_tensors_can_be_saved(tmp_path: Path) -> None:
    flat = torch.arange(24.0)
    saved = {"master": {"a": flat[:12].view(3, 4), "b": flat[12:].view(4, 3).t()}}
    save_state(tmp_path, 1, saved, {})
    assert_equal(saved, load_state(tmp_path, 1)[0])


def test_versions_are_listed_in_order_and_strangers_left_alone(tmp_path: Path) -> None:
    assert checkpoint_versions(tmp_path / "missing") == []
    for version in (10, 2, 1000000):
        save_state(tmp_path, version, groups(), {})
    (tmp_path / "version-abc").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    assert checkpoint_versions(tmp_path) == [2, 10, 1000000]
    assert (tmp_path / "version-abc").exists() and (tmp_path / "notes.txt").exists()


def test_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    for version in (1, 2, 3, 4):
        save_state(tmp_path, version, groups(version), {})
    assert prune(tmp_path, keep=2) == [3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-000003", "version-000004"]
    assert prune(tmp_path, keep=5) == [3, 4]
    assert_equal(groups(3), load_state(tmp_path, 3)[0])


def test_saving_a_version_again_replaces_it(tmp_path: Path) -> None:
    save_state(tmp_path, 1, groups(1), {"life": 1})
    save_state(tmp_path, 1, groups(2), {"life": 2})
    loaded, facts = load_state(tmp_path, 1)
    assert_equal(groups(2), loaded)
    assert facts["life"] == 2


@pytest.mark.parametrize("file", [TENSORS, STATE])
@pytest.mark.parametrize("damage", ["missing", "empty", "short", "flipped"])
def test_a_damaged_checkpoint_is_one_clear_line_that_names_it(
    tmp_path: Path, file: str, damage: str
) -> None:
    path = save_state(tmp_path, 3, groups(), {"optimizer_steps": 3}) / file
    content = bytearray(path.read_bytes())
    match damage:
        case "missing":
            path.unlink()
        case "empty":
            path.write_bytes(b"")
        case "short":
            path.write_bytes(content[:-3])
        case "flipped":
            content[-9 if file == TENSORS else content.index(b"optimizer_steps") + 18] ^= 1
            path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load_state(tmp_path, 3)
    line = str(caught.value)
    assert str(path.parent) in line and "\n" not in line
    assert f"delete {path.parent} to resume from the checkpoint before it" in line


def test_a_checkpoint_under_another_number_is_refused(tmp_path: Path) -> None:
    save_state(tmp_path, 3, groups(), {}).rename(tmp_path / "version-000004")
    with pytest.raises(CheckpointError, match="holds version 3"):
        load_state(tmp_path, 4)


def test_a_full_disk_is_one_clear_line_and_leaves_earlier_checkpoints(tmp_path: Path) -> None:
    code = f"""
import resource, torch
from pathlib import Path
from integrations.errors import CheckpointError
from integrations.trainer.checkpoint import save_state
folder = Path({str(tmp_path)!r})
save_state(folder, 1, {{"master": {{"w": torch.ones(10)}}}}, {{}})
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    save_state(folder, 2, {{"master": {{"w": torch.ones(100000)}}}}, {{}})
except CheckpointError as error:
    print(error)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"cannot write checkpoint {tmp_path / 'version-000002'}" in out.stdout
    assert out.stdout.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["version-000001"]


WRITER = """
import sys, torch
from pathlib import Path
from integrations.trainer.checkpoint import prune, save_state
folder, version = Path(sys.argv[1]), int(sys.argv[2])
while True:
    version += 1
    save_state(folder, version, {"master": {"w": torch.full((200000,), float(version))}}, {})
    prune(folder, 2)
    print(version, flush=True)
"""


def test_kill_9_at_any_moment_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    newest = 0
    for life in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(newest)], stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        for _ in range(3 + life):
            newest = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        said = [int(line) for line in writer.stdout.read().split(b"\n")[:-1]]
        writer.stdout.close()
        writer.wait()
        newest = max([newest, *said])
        versions = checkpoint_versions(tmp_path)
        assert versions[-1] >= newest and 1 <= len(versions) <= 3
        for version in versions:
            loaded, _ = load_state(tmp_path, version)
            assert torch.equal(loaded["master"]["w"], torch.full((200000,), float(version)))
        assert {path.name for path in tmp_path.iterdir()} == {
            f"version-{version:06d}" for version in versions
        }
        newest = versions[-1]


def test_the_state_file_is_readable_json(tmp_path: Path) -> None:
    path = save_state(tmp_path, 5, groups(), {"optimizer_steps": 5})
    assert json.loads((path / STATE).read_text())["optimizer_steps"] == 5
