from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from integrations.errors import JournalError
from integrations.trainer.journal import (
    FILE,
    CheckpointSaved,
    Evaluated,
    Journal,
    RecoveredState,
    StepDone,
    StepPlanned,
    TrajectoryDone,
)

GROUP = 2


def payload(prompt: int, sample: int) -> bytes:
    return f"trajectory {prompt}/{sample}".encode()


def done(prompt: int, sample: int) -> TrajectoryDone:
    return TrajectoryDone(prompt, sample, payload(prompt, sample))


def group(*prompts: int) -> list[TrajectoryDone]:
    return [done(prompt, sample) for prompt in prompts for sample in range(GROUP)]


def write(folder: Path, records: list[Any]) -> Journal:
    journal = Journal(folder)
    for record in records:
        journal.append(record)
    return journal


def recover(folder: Path, checkpoint: int | None = None) -> RecoveredState:
    journal = Journal(folder)
    try:
        return journal.recover(checkpoint, GROUP)
    finally:
        journal.close()


# Two finished steps of two prompts each, a third one planned, and later prompts in part.
RUN: list[Any] = [
    *group(0, 1),
    StepPlanned(1, (0, 1)),
    *group(3, 2),
    StepDone(1, 1, "digest-1"),
    CheckpointSaved(1),
    Evaluated(1, 0.25, "during"),
    StepPlanned(2, (2, 3)),
    *group(4),
    StepDone(2, 2, "digest-2"),
    *group(5),
    StepPlanned(3, (4, 5)),
    done(8, 1),
    *group(7),
]


def test_an_empty_journal_begins_at_the_first_prompt(tmp_path: Path) -> None:
    state = recover(tmp_path / "journal")
    assert state.next_prompt_index == 0
    assert state.consumed_prompts == state.consumed_trajectories == 0
    assert (state.trajectories, state.planned_steps, state.unfinished_prompts) == ((), (), ())


def test_everything_after_the_checkpoint_is_recovered(tmp_path: Path) -> None:
    write(tmp_path, RUN).close()
    state = recover(tmp_path, checkpoint=1)
    assert state.consumed_prompts == 2
    assert state.consumed_trajectories == 2 * GROUP
    expected = {payload(p, s) for p in (2, 3, 4, 5, 7) for s in range(GROUP)} | {payload(8, 1)}
    assert set(state.trajectories) == expected
    assert len(state.trajectories) == len(expected)
    assert state.planned_steps == (StepPlanned(2, (2, 3)), StepPlanned(3, (4, 5)))
    assert state.step_digests == {2: "digest-2"}
    assert state.evaluations == (Evaluated(1, 0.25, "during"),)


def test_prompts_that_were_overtaken_or_left_in_part_are_neither_skipped_nor_repeated(
    tmp_path: Path,
) -> None:
    write(tmp_path, RUN).close()
    state = recover(tmp_path, checkpoint=1)
    # 6 was never heard of although 7 is complete; 8 has its second sample only.
    assert state.unfinished_prompts == ((6, frozenset()), (8, frozenset({1})))
    assert state.next_prompt_index == 9


def test_without_a_checkpoint_every_step_is_repeated(tmp_path: Path) -> None:
    write(tmp_path, RUN).close()
    state = recover(tmp_path)
    assert state.checkpoint_version is None
    assert [plan.step for plan in state.planned_steps] == [1, 2, 3]
    assert state.consumed_prompts == 0
    assert len(state.trajectories) == sum(isinstance(record, TrajectoryDone) for record in RUN)


@pytest.mark.parametrize("cut", ["after a restart", "in one process"])
def test_compaction_changes_nothing_that_a_resume_sees(tmp_path: Path, cut: str) -> None:
    journal = write(tmp_path, RUN)
    before = journal.recover(1, GROUP)
    size = (tmp_path / FILE).stat().st_size
    if cut == "after a restart":
        journal.close()
        journal = Journal(tmp_path)
    journal.compact(1, GROUP)
    assert journal.recover(1, GROUP) == before
    journal.append(done(8, 0))
    journal.close()
    assert (tmp_path / FILE).stat().st_size < size
    after = recover(tmp_path, checkpoint=1)
    assert after.unfinished_prompts == ((6, frozenset()),)
    assert set(after.trajectories) == {*before.trajectories, payload(8, 0)}


def test_compaction_can_be_repeated_as_the_run_goes_on(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    sizes = []
    for step in range(1, 30):
        prompts = (2 * step - 2, 2 * step - 1)
        for record in (*group(*prompts), StepPlanned(step, prompts), StepDone(step, step, "d")):
            journal.append(record)
        journal.append(CheckpointSaved(step))
        journal.compact(max(step - 1, 1), GROUP)
        sizes.append((tmp_path / FILE).stat().st_size)
    journal.close()
    assert max(sizes[1:]) < 1.1 * min(sizes[1:])
    state = recover(tmp_path, checkpoint=29)
    assert (state.consumed_prompts, state.consumed_trajectories) == (58, 58 * GROUP)
    assert (state.next_prompt_index, state.trajectories) == (58, ())


def test_a_crash_while_compacting_leaves_the_old_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = write(tmp_path, RUN)
    before = journal.recover(1, GROUP)

    def refuse(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", refuse)
        with pytest.raises(JournalError, match="cannot be rewritten"):
            journal.compact(1, GROUP)
    journal.append(done(6, 0))
    journal.close()
    after = recover(tmp_path, checkpoint=1)
    assert set(after.trajectories) == {*before.trajectories, payload(6, 0)}


# ---------------------------------------------------------------- torn and damaged files


def test_a_record_cut_at_any_byte_is_dropped_and_every_earlier_one_kept(tmp_path: Path) -> None:
    write(tmp_path, RUN[:-1]).close()
    whole = (tmp_path / FILE).stat().st_size
    write(tmp_path, RUN[-1:]).close()
    data = (tmp_path / FILE).read_bytes()
    for size in range(whole, len(data)):
        (tmp_path / FILE).write_bytes(data[:size])
        journal = Journal(tmp_path)
        assert journal.torn_bytes == size - whole
        assert (tmp_path / FILE).stat().st_size == whole
        state = journal.recover(1, GROUP)
        assert (7, frozenset({0})) in state.unfinished_prompts
        journal.append(RUN[-1])
        journal.close()
        assert (tmp_path / FILE).read_bytes() == data


def test_zeros_left_by_a_power_failure_are_dropped(tmp_path: Path) -> None:
    write(tmp_path, RUN).close()
    data = (tmp_path / FILE).read_bytes()
    for zeros in (1, 16, 4096):
        (tmp_path / FILE).write_bytes(data + bytes(zeros))
        journal = Journal(tmp_path)
        journal.close()
        assert journal.torn_bytes == zeros
        assert (tmp_path / FILE).read_bytes() == data


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_flipped_bit_is_an_error_unless_only_the_last_record_is_lost(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    write(folder, RUN[:-1]).close()
    last = (folder / FILE).stat().st_size
    write(folder, RUN[-1:]).close()
    content = bytearray((folder / FILE).read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= 1 << data.draw(st.integers(0, 7))
    (folder / FILE).write_bytes(content)
    if position < last:
        with pytest.raises(JournalError, match=r"the record at byte [0-9]+ is damaged") as caught:
            Journal(folder)
        line = str(caught.value)
        assert str(folder / FILE) in line and "\n" not in line
        # Nothing was changed: the damaged file may still be repaired.
        assert (folder / FILE).read_bytes() == bytes(content)
    else:
        try:
            state = recover(folder, checkpoint=1)
        except JournalError:
            return
        assert (7, frozenset({0})) in state.unfinished_prompts


def test_a_damaged_journal_goes_on_after_the_truncation_that_its_error_names(
    tmp_path: Path,
) -> None:
    write(tmp_path, RUN).close()
    content = bytearray((tmp_path / FILE).read_bytes())
    content[-200] ^= 1
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(JournalError) as caught:
        Journal(tmp_path)
    command = str(caught.value).split("give up what follows: ")[1]
    subprocess.run(command.split(), check=True)
    assert recover(tmp_path, checkpoint=1).consumed_prompts == 2


def test_a_record_of_another_release_is_an_error(tmp_path: Path) -> None:
    class Unheard(msgspec.Struct, frozen=True, tag="unheard_of"):
        value: int

    write(tmp_path, [*RUN, Unheard(3), done(9, 0)]).close()
    with pytest.raises(JournalError, match="is unknown"):
        Journal(tmp_path)


def test_a_journal_that_does_not_belong_to_the_checkpoint_is_an_error(tmp_path: Path) -> None:
    journal = write(tmp_path, RUN)
    with pytest.raises(JournalError, match="does not say what step 4 was trained on"):
        journal.recover(7, GROUP)
    journal.compact(2, GROUP)
    with pytest.raises(JournalError, match="begins after step 2, but the newest checkpoint is of"):
        journal.recover(1, GROUP)
    journal.close()


# ---------------------------------------------------------------- full disks and killed processes


def test_a_full_disk_is_one_clear_line_and_leaves_the_journal_whole(tmp_path: Path) -> None:
    code = f"""
import resource
from integrations.trainer.journal import Journal, TrajectoryDone
from integrations.errors import JournalError
from pathlib import Path
journal = Journal(Path({str(tmp_path)!r}))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    for index in range(100):
        journal.append(TrajectoryDone(index, 0, bytes(150)))
except JournalError as error:
    print(index, error)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    written, _, line = out.stdout.strip().partition(" ")
    assert int(written) > 1
    assert "cannot be written" in line and str(tmp_path / FILE) in line and "\n" not in line
    journal = Journal(tmp_path)
    assert journal.torn_bytes == 0
    assert len(journal.recover(None, 1).trajectories) == int(written)
    journal.close()


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match=r"file/journal\.log cannot be opened"):
        Journal(tmp_path / "file")


WRITER = """
import sys
from pathlib import Path
from integrations.trainer.journal import CheckpointSaved, Journal
from integrations.trainer.journal import StepDone, StepPlanned, TrajectoryDone
journal = Journal(Path(sys.argv[1]))
state = journal.recover(int(sys.argv[2]) or None, 1)
step = max([int(sys.argv[2])] + [plan.step for plan in state.planned_steps])
index = state.next_prompt_index
held = [i for i, _ in state.unfinished_prompts]
assert not held, held
ready = [int(p.split(b" ")[0]) for p in state.trajectories]
for plan in state.planned_steps:
    ready = [i for i in ready if i not in plan.prompt_indices]
while True:
    while len(ready) < 3:
        journal.append(TrajectoryDone(index, 0, b"%d " % index + bytes(index * 37 % 3000)))
        print("done", index, flush=True)
        ready.append(index)
        index += 1
    step += 1
    batch, ready = tuple(sorted(ready)[:2]), sorted(ready)[2:]
    journal.append(StepPlanned(step, batch))
    print("planned", step, *batch, flush=True)
    journal.append(StepDone(step, step, "digest"))
    if step % 4 == 0:
        journal.append(CheckpointSaved(step))
        print("checkpoint", step, flush=True)
        journal.compact(step, 1)
"""


def test_kill_9_at_any_moment_loses_repeats_and_skips_nothing(tmp_path: Path) -> None:
    """What a writer has said is in the journal stays there, over ten lives of the writer."""
    checkpoint = 0
    said_done: set[int] = set()
    said_planned: dict[int, tuple[int, ...]] = {}
    for life in range(10):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(checkpoint)], stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        lines = [writer.stdout.readline()]
        for _ in range(20 + 17 * life):
            lines.append(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        lines += writer.stdout.read().splitlines(keepends=True)
        writer.stdout.close()
        assert writer.wait() == -signal.SIGKILL
        for line in lines:
            # A line without its end was being written when the signal came.
            kind, *numbers = line.decode().split() if line.endswith(b"\n") else [""]
            values = [int(number) for number in numbers]
            if kind == "done":
                assert values[0] not in said_done, "a prompt was repeated"
                said_done.add(values[0])
            elif kind == "planned":
                assert values[0] not in said_planned
                said_planned[values[0]] = tuple(values[1:])
            elif kind == "checkpoint":
                checkpoint = values[0]
        state = recover_single(tmp_path, checkpoint)
        consumed = {i for s, batch in said_planned.items() if s <= checkpoint for i in batch}
        kept = {int(p.split(b" ")[0]) for p in state.trajectories}
        assert said_done - consumed <= kept, "a trajectory was lost"
        plans = {plan.step: plan.prompt_indices for plan in state.planned_steps}
        for step, batch in said_planned.items():
            assert step <= checkpoint or plans[step] == batch
        # What was written and not yet said belongs to the writer's last life.
        said_planned.update(plans)
        said_done |= kept
        assert sorted(said_done) == list(range(state.next_prompt_index)), "a prompt was skipped"


def recover_single(folder: Path, checkpoint: int) -> RecoveredState:
    journal = Journal(folder)
    try:
        return journal.recover(checkpoint or None, 1)
    finally:
        journal.close()


def test_closing_twice_is_harmless(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.close()
    journal.close()
