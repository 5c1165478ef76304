"""The ``lockstep`` command, from its arguments to its exit code."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from consistency.errors import InvalidInputError
from consistency.routing_replay import RoutingTrace
from integrations import cli_train, doctor
from integrations.cli import main
from integrations.cli_trace import layer_loads
from integrations.errors import ModelSourceError, RunError, RunLockError
from integrations.trainer.observers import JsonlObserver
from integrations.trainer.run_lock import run_lock

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"


@pytest.fixture
def lockstep(capsys, monkeypatch):
    """Runs the command; returns its exit code, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def trainer(monkeypatch):
    """Puts a trainer in place that plays events and then returns, or raises, what a test says.

    The report is a stand-in, because drawing takes seconds; ``draws=True`` leaves the real one.
    """

    def install(events, *, ends_with=None, draws=False):
        if not draws:
            monkeypatch.setattr(cli_train, "save_report", stand_in)
        calls = []

        def train(recipe, *, resume, observer):
            calls.append((recipe, resume))
            for event in events:
                observer(event)
            if isinstance(ends_with, BaseException):
                raise ends_with
            if callable(ends_with):
                ends_with()
            return events[-1]["summary"]

        module = types.ModuleType("integrations.trainer.run")
        module.train = train  # pyright: ignore[reportAttributeAccessIssue]
        monkeypatch.setitem(sys.modules, "integrations.trainer.run", module)
        return calls

    return install


def stand_in(run, out=None):
    page = run.folder / "report.html"
    page.write_text(f"{len(run.steps)} versions")
    return page


def one_line(text):
    assert text.count("\n") == 1 and text.startswith("lockstep: "), text
    return text.removeprefix("lockstep: ").strip()


# ---------------------------------------------------------------- the command itself


def test_help_and_version_start_fast_because_torch_is_not_imported():
    program = (
        "import sys; from integrations.cli import main; code = main(['--version']);"
        "code += main(['train', '--help']);"
        "print(code, sorted({'torch', 'matplotlib', 'yaml'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines()[0].startswith("lockstep")
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr


@pytest.mark.parametrize("command", [[], ["train"], ["doctor"], ["report"], ["trace", "inspect"]])
def test_every_command_explains_itself(lockstep, command):
    code, out, err = lockstep(*command, "--help")
    assert (code, err) == (0, "")
    if command:
        assert "--json" in out and "--debug" in out


def test_without_a_command_the_help_is_shown(lockstep):
    code, out, _ = lockstep()
    assert code == 0 and "doctor" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], "train"),
        (["train"], "RECIPE"),
        (["train", "x.yaml", "--no-such-option"], "--no-such-option"),
        (["train", "x.yaml"], "no such file"),
        (["train", RECIPE, "learner.step=3"], "did you mean learner.steps?"),
        (["train", RECIPE, "learner.steps=-3"], "learner.steps"),
        (["train", RECIPE, "nonsense"], "'='"),
        (["report", "no-such-run"], "no such directory"),
        (["trace", "inspect", "no-such-file"], "No such file"),
        (["report", ".", "--json", "no/such/folder/x.json"], "does not exist"),
        (["doctor", "--json", "/tmp"], "is a folder"),
        (["report", ".", "--out", "no/such/folder/x.html"], "does not exist"),
        (["report", ".", "--png", "/tmp"], "is a folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(lockstep, arguments, words):
    code, out, err = lockstep(*arguments)
    assert (code, out) == (2, "")
    assert words in one_line(err)


# ---------------------------------------------------------------- train --dry-run


def test_a_dry_run_prints_the_resolved_recipe_and_touches_nothing(lockstep, tmp_path):
    from integrations.trainer.recipe import load_recipe

    run_dir, json_file = tmp_path / "a run", tmp_path / "recipe.json"
    code, out, err = lockstep(
        "train", RECIPE, "learner.steps=7", "--dry-run", "--run-dir", run_dir, "--json", json_file
    )
    assert (code, err) == (0, "")
    (tmp_path / "printed.yaml").write_text(out)
    printed = load_recipe(tmp_path / "printed.yaml")
    assert printed == load_recipe(RECIPE, ["learner.steps=7", f"run_dir={run_dir}"])
    assert json.loads(json_file.read_text())["learner"]["steps"] == 7
    assert not run_dir.exists()


@pytest.mark.parametrize("name", ["1e3", "yes", "a: b", "#x", "[x]"])
def test_any_folder_name_can_be_the_run_dir(lockstep, tmp_path, name):
    json_file = tmp_path / "recipe.json"
    code, _, err = lockstep(
        "train", RECIPE, "--dry-run", "--run-dir", name, "--json", json_file
    )  # fmt: skip
    assert code == 0, err
    assert json.loads(json_file.read_text())["run_dir"] == name


# ---------------------------------------------------------------- train


def test_a_run_ends_with_a_summary_a_report_and_exit_code_0(
    lockstep, trainer, tmp_path, make_events
):
    events = make_events(versions=4)
    calls = trainer(events, draws=True)
    run_dir, json_file = tmp_path / "run", tmp_path / "summary.json"
    code, out, err = lockstep("train", RECIPE, "--run-dir", run_dir, "--json", json_file)
    assert code == 0
    assert json.loads(json_file.read_text()) == events[-1]["summary"]
    assert "exactly 0" in out and str(run_dir / "report.html") in out
    assert "run quickstart started" in err and "Traceback" not in err
    assert {"metrics.jsonl", "report.html", "tensorboard"} <= {p.name for p in run_dir.iterdir()}
    assert [(str(recipe.run_dir), resume) for recipe, resume in calls] == [(str(run_dir), False)]


def test_a_quiet_run_prints_nothing(lockstep, trainer, tmp_path, make_events):
    trainer(make_events(versions=1))
    assert lockstep("train", RECIPE, "--run-dir", tmp_path, "--quiet") == (0, "", "")


def test_a_run_dir_that_holds_a_run_is_kept_unless_resume_is_asked_for(
    lockstep, trainer, make_run, make_events
):
    calls = trainer(make_events(versions=1))
    run_dir = make_run(versions=1)
    before = (run_dir / "metrics.jsonl").read_bytes()
    code, _, err = lockstep("train", RECIPE, "--run-dir", run_dir)
    text = one_line(err)
    assert code == 2 and "--resume" in text and "--run-dir" in text
    assert (run_dir / "metrics.jsonl").read_bytes() == before and not calls
    assert lockstep("train", RECIPE, "--run-dir", run_dir, "--resume")[0] == 0
    assert calls[0][1] is True
    assert (run_dir / "metrics.jsonl").read_bytes().startswith(before)


def test_fresh_keeps_the_earlier_run_beside_the_new_one(lockstep, trainer, make_run, make_events):
    trainer(make_events(versions=1))
    run_dir = make_run(versions=1)
    before = (run_dir / "metrics.jsonl").read_bytes()
    for number in (1, 2):
        assert lockstep("train", RECIPE, "--run-dir", run_dir, "--fresh", "--quiet")[0] == 0
        assert run_dir.with_name(f"{run_dir.name}-old-{number}").is_dir()
    aside = run_dir.with_name(f"{run_dir.name}-old-1")
    assert (aside / "metrics.jsonl").read_bytes() == before
    code, _, err = lockstep("train", RECIPE, "--run-dir", run_dir, "--fresh", "--resume")
    assert code == 2 and "give one of them" in one_line(err)


def test_fresh_does_not_take_the_folder_from_a_run_that_goes_on(lockstep, trainer, make_run):
    calls = trainer([])
    run_dir = make_run(versions=1)
    with run_lock(run_dir):
        code, _, err = lockstep("train", RECIPE, "--run-dir", run_dir, "--fresh")
    assert code != 0 and "in use by process" in one_line(err)
    assert (run_dir / "metrics.jsonl").is_file() and not calls


def test_resume_without_a_run_is_refused_because_a_mistyped_folder_would_start_afresh(
    lockstep, trainer, tmp_path, make_events
):
    calls = trainer(make_events(versions=1))
    code, _, err = lockstep("train", RECIPE, "--run-dir", tmp_path / "typo", "--resume")
    assert code == 2 and "leave out --resume" in one_line(err)
    assert not calls and not (tmp_path / "typo").exists()


@pytest.mark.parametrize(
    "error",
    [
        RunError("learner: loss is not finite in step 3"),
        InvalidInputError("x has dtype int8"),
        OSError(errno.ENOSPC, "No space left on device", "runs/x/journal"),
    ],
)
def test_a_failed_run_is_one_line_exit_code_1_and_a_report(
    lockstep, trainer, tmp_path, make_events, error
):
    trainer(make_events(versions=1, failure="see below"), ends_with=error)
    code, _, err = lockstep("train", RECIPE, "--run-dir", tmp_path, "--quiet")
    assert code == 1
    text = one_line(err)
    assert str(error) == text or text == "runs/x/journal: No space left on device"
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("error", "expected"),
    [(ModelSourceError("model.path: no such folder"), 2), (RunLockError("in use"), 1)],
)
def test_a_run_that_never_began_leaves_no_trace(lockstep, trainer, tmp_path, error, expected):
    trainer([], ends_with=error)
    code, _, err = lockstep("train", RECIPE, "--run-dir", tmp_path / "run")
    assert (code, one_line(err)) == (expected, str(error))
    assert not (tmp_path / "run").exists()


def test_debug_adds_the_traceback_and_keeps_the_line(lockstep, trainer, tmp_path):
    trainer([], ends_with=RunError("the reason"))
    code, _, err = lockstep("train", RECIPE, "--run-dir", tmp_path / "run", "--debug")
    assert code == 1
    assert "Traceback" in err and err.endswith("lockstep: the reason\n")


def test_an_error_that_nobody_expected_keeps_its_traceback(trainer, tmp_path):
    trainer([], ends_with=ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        main(["train", str(RECIPE), "--run-dir", str(tmp_path / "run")])


def test_a_full_disk_under_the_events_ends_the_run_with_one_line(
    lockstep, trainer, tmp_path, make_events, monkeypatch
):
    full = JsonlObserver("/dev/full")
    monkeypatch.setattr(cli_train, "JsonlObserver", lambda path: full)
    trainer(make_events(versions=1))
    code, _, err = lockstep("train", RECIPE, "--run-dir", tmp_path / "run", "--quiet")
    assert code == 1
    assert one_line(err) == "/dev/full: No space left on device"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_says_how_to_go_on_and_leaves_a_report(
    lockstep, trainer, tmp_path, make_events, number, code
):
    before = signal.getsignal(signal.SIGTERM)
    trainer(make_events(versions=2)[:-1], ends_with=lambda: os.kill(os.getpid(), number))
    run_dir = tmp_path / "my run"
    found, _, err = lockstep("train", RECIPE, "learner.steps=9", "--run-dir", run_dir, "--quiet")
    assert found == code
    expected = f"lockstep train {RECIPE} learner.steps=9 --run-dir '{run_dir}' --resume"
    assert one_line(err) == f"stopped; go on with: {expected}"
    assert (run_dir / "report.html").exists()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_report_that_cannot_be_drawn_does_not_spoil_the_result(
    lockstep, trainer, tmp_path, make_events, monkeypatch
):
    def fail(run, out=None):
        raise ZeroDivisionError("a plot is broken")

    trainer(make_events(versions=1))
    monkeypatch.setattr(cli_train, "save_report", fail)
    code, out, err = lockstep("train", RECIPE, "--run-dir", tmp_path)
    assert code == 0 and "exactly 0" in out
    assert "no report could be drawn (a plot is broken)" in err


# ---------------------------------------------------------------- report, doctor


def test_report_writes_page_picture_and_json(lockstep, make_run, tmp_path):
    run_dir = make_run(versions=3, failure="out of memory")
    page, picture, data = tmp_path / "x.html", tmp_path / "x.png", tmp_path / "x.json"
    code, out, _ = lockstep("report", run_dir, "--out", page, "--png", picture, "--json", data)
    assert code == 0 and page.exists() and picture.exists()
    assert f"report: {page}" in out and "out of memory" in out
    found = json.loads(data.read_text())
    assert found["status"] == "failed" and found["reason"] == "out of memory"
    assert found["summary"]["k3_kl"] == 0 and found["weight_versions"] == 3
    assert not (run_dir / "report.html").exists()


def test_doctor_writes_json_and_its_exit_code_follows_the_embedded_path(
    lockstep, tmp_path, monkeypatch
):
    code, out, _ = lockstep("doctor", "--json", tmp_path / "x.json")
    assert code == 0 and "what works here" in out
    assert json.loads((tmp_path / "x.json").read_text())["embedded_works"] is True
    failed = doctor.Check("kernels", False, "broken", "build them")
    monkeypatch.setattr(doctor, "_check_kernels", lambda: (None, (), failed))
    code, out, err = lockstep("doctor")
    assert code == 1 and "build them" in out and err == ""


# ---------------------------------------------------------------- trace inspect


def trace_of(tokens=20, layers=(1, 2, 5), experts=8, topk=2):
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(tokens, len(layers), experts, generator=generator).topk(topk).indices
    first = RoutingTrace.of(
        ids[:12], layers=layers, experts=experts, weight_version=3, origin="prefilled"
    )
    return first.extended(ids[12:], weight_version=4, origin="generated").padded(tokens + 1)


def test_inspect_shows_sizes_segments_and_load(lockstep, tmp_path):
    trace = trace_of()
    file = tmp_path / "trace.bin"
    file.write_bytes(trace.to_bytes())
    code, out, _ = lockstep("trace", "inspect", file, "--json", tmp_path / "x.json")
    assert code == 0
    assert re.search(r"0:12 .*3 .*prefilled", out) and re.search(r"12:20 .*4 .*generated", out)
    assert "decoder layers 1-2, 5" in out and trace.digest() in out
    data = json.loads((tmp_path / "x.json").read_text())
    assert (data["tokens"], data["valid_tokens"], data["experts"], data["topk"]) == (21, 20, 8, 2)
    assert [sum(layer["counts"]) for layer in data["load"]] == [40, 40, 40]


def test_load_counts_only_tokens_that_were_routed_and_one_is_perfect_balance():
    ids = torch.tensor([[[0, 1]], [[2, 3]]])
    trace = RoutingTrace.of(
        ids, layers=(0,), experts=4, weight_version=1, origin="generated"
    ).padded(9)
    (load,) = layer_loads(trace)
    assert (load.counts, load.imbalance, load.used) == ((1, 1, 1, 1), 1.0, 4)


def test_a_damaged_trace_is_one_line_that_names_the_file(lockstep, tmp_path):
    file = tmp_path / "trace.bin"
    data = bytearray(trace_of().to_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    code, out, err = lockstep("trace", "inspect", file)
    assert (code, out) == (2, "") and str(file) in one_line(err)
