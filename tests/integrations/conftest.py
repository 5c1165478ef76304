"""Events of an asynchronous run that never happened, for the tests of what reads events."""

from __future__ import annotations

import bisect
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Event = dict[str, Any]

RECIPE: Event = {
    "name": "quickstart",
    "seed": 0,
    "run_dir": "runs/quickstart",
    "task": {"name": "chain_sum", "config": {"min_terms": 2, "max_terms": 2}, "held_out": 128},
    "learner": {"groups_per_step": 16, "samples_per_group": 8},
    "staleness": {"max": 2},
    "routing_replay": True,
}
WALL = 1_760_000_000.0
MODEL_BYTES = 4_214_784


class SyntheticRun:
    """A learner that trains a version a second while a rollout engine never stops."""

    def __init__(self, *, versions: int, seed: int, drift: float, step_seconds: float) -> None:
        self.versions = versions
        self.drift = drift
        self.step_seconds = step_seconds
        self.random = random.Random(seed)
        self.timed: list[tuple[float, Event]] = []

    def emit(self, at: float, event: str, **fields: Any) -> None:
        self.timed.append((at, {"event": event, "t": at, "wall": WALL + at, **fields}))

    def reward(self, version: int) -> float:
        return 0.93 - 0.63 * math.exp(-3.2 * version / max(self.versions, 1))

    def start(self, at: float, *, resumed: bool) -> None:
        self.emit(
            at,
            "run_started",
            recipe={**RECIPE, "learner": {**RECIPE["learner"], "steps": self.versions}},
            versions={"python": "3.11.7", "torch": "2.13.0+cpu", "lockstep": "0.1.0"},
            resumed=resumed,
            contract="5f0c9a1e22b7d314",
        )
        self.emit(at + 0.8, "model", parameters=2_107_392, model_bytes=MODEL_BYTES)

    def warm_start(self, begin: float, end: float, steps: int = 60) -> None:
        for step in range(1, steps + 1):
            at = begin + (end - begin) * step / steps
            self.emit(
                at, "warm_start", step=step, steps=steps, loss=2.9 * math.exp(-step / 22) + 0.4
            )

    def evaluate(self, at: float, version: int, phase: str) -> None:
        noise = self.random.gauss(0, 0.012)
        reward = min(1.0, max(0.0, self.reward(version) + noise))
        self.emit(at, "evaluation", version=version, reward=reward, prompts=128, phase=phase)

    def step(self, started: float, version: int) -> float:
        ended = started + self.step_seconds * self.random.uniform(0.72, 0.95)
        tokens = self.random.randint(900, 1250)
        stale = min(version, self.random.choice((1, 1, 1, 2)))
        drift = self.drift * self.random.uniform(0.5, 1.5)
        progress = version / self.versions
        self.emit(
            ended,
            "step",
            step=version,
            version=version,
            loss=self.random.gauss(-0.004, 0.012),
            reward_mean=self.reward(version) + self.random.gauss(0, 0.03),
            reward_std=0.45 - 0.25 * progress,
            entropy=1.1 * math.exp(-2 * progress) + self.random.gauss(0, 0.02) + 0.1,
            k3_kl=drift**2,
            mean_abs_diff=drift,
            max_abs_diff=9 * drift,
            exact_fraction=1.0 if drift == 0 else 0.4,
            router_flip_rate=drift / 3,
            router_pairs=464.0,
            audited_tokens=232.0,
            unaudited_tokens=0.0,
            off_policy_k3_kl=0.004 * stale * self.random.uniform(0.5, 1.5),
            ess=1 - 0.02 * stale * self.random.uniform(0.4, 1.2),
            masked_fraction=0.002 * stale,
            clip_fraction=0.01 * self.random.uniform(0.3, 1.4),
            gradient_norm=0.4 + 0.3 * self.random.random(),
            tokens=tokens,
            trajectories=128,
            response_length_mean=2.2 + 0.5 * progress,
            staleness_mean=stale * 0.62,
            staleness_max=stale,
            learner_tokens_per_second=tokens / (ended - started),
            started=started,
            ended=ended,
        )
        return ended

    def swap(self, published: float, version: int) -> None:
        staged = published + self.random.uniform(0.006, 0.012)
        committed = staged + self.random.uniform(0.001, 0.02)
        self.emit(
            committed,
            "swap",
            version=version,
            replica="rollout-0",
            bytes=MODEL_BYTES,
            announced=published,
            staged=staged,
            committed=committed,
            stage_seconds=staged - published,
            swap_seconds=committed - published,
            pause_seconds=self.random.uniform(0.0004, 0.0019),
        )

    def samples(self, at: float, version: int) -> None:
        for _ in range(3):
            left, right = self.random.randint(0, 9), self.random.randint(0, 9)
            correct = self.random.random() < self.reward(version)
            answer = left + right if correct else left + right + self.random.choice((-2, -1, 1, 2))
            self.emit(
                at,
                "sample",
                version=version,
                prompt=f"{left} + {right} = ",
                response=f"{answer}\n",
                reward=float(correct),
            )

    def roll(self, begin: float, end: float) -> None:
        at = begin
        commits = sorted((at, e["version"]) for at, e in self.timed if e["event"] == "swap")
        while at + 0.5 <= end:
            busy = 0.5 * self.random.uniform(0.9, 1.0)
            version = commits[max(0, bisect.bisect(commits, (at,)) - 1)][1]
            self.emit(
                at + 0.5,
                "rollout",
                replica="rollout-0",
                started=at,
                ended=at + 0.5,
                busy_seconds=busy,
                tokens=int(busy * self.random.gauss(1480, 90)),
                prefill_tokens=310,
                cached_tokens=95,
                running=self.random.randint(40, 64),
                waiting=self.random.randint(0, 32),
                version=version,
            )
            at += 0.5

    def train(self, begin: float, first: int, last: int) -> float:
        now = begin
        self.swap(begin - 0.4, first - 1)
        for version in range(first, last + 1):
            now = self.step(now + self.step_seconds * self.random.uniform(0.03, 0.2), version)
            self.swap(now + 0.002, version)
            self.samples(now + 0.003, version)
            if version % 10 == 0 and version < self.versions:
                self.evaluate(now + 0.4, version, "during")
            if version % 5 == 0:
                self.emit(now + 0.05, "checkpoint", version=version, seconds=0.04)
        return now

    def finish(self, at: float) -> None:
        steps = [e for _, e in self.timed if e["event"] == "step"]
        summary = {
            "reward_start": 0.3125,
            "reward_end": 0.921875,
            "k3_kl": sum(e["k3_kl"] for e in steps) / len(steps),
            "max_abs_diff": max(e["max_abs_diff"] for e in steps),
            "router_flip_rate": max(e["router_flip_rate"] for e in steps),
            "max_staleness": max(e["staleness_max"] for e in steps),
            "swaps": self.versions,
            "swap_seconds_p50": 0.0192,
            "pause_seconds_max": 0.00188,
            "rollout_tokens_per_second": 1391.0,
            "learner_tokens_per_second": 1294.0,
            "trajectories": 128 * self.versions,
            "lost": 0,
        }
        self.emit(at, "run_finished", summary=summary)

    def events(self) -> list[Event]:
        """In the order of time, as a controller would have written them."""
        return [event for _, event in sorted(self.timed, key=lambda pair: pair[0])]


def synthetic_events(
    *,
    versions: int = 60,
    seed: int = 0,
    drift: float = 0.0,
    killed_at: int | None = None,
    failure: str | None = None,
    step_seconds: float = 1.0,
) -> list[Event]:
    """Events of one run.

    `killed_at`: the controller dies after that version and the run is resumed from the checkpoint
    before it. `failure`: the run ends with `run_failed` instead of `run_finished`.
    """
    run = SyntheticRun(versions=versions, seed=seed, drift=drift, step_seconds=step_seconds)
    run.start(0.0, resumed=False)
    run.warm_start(1.2, 9.0)
    run.evaluate(9.8, 0, "start")
    first, begin = 1, 10.0
    if killed_at is not None:
        end = run.train(begin, 1, killed_at)
        run.roll(begin, end)
        run.start(end + 1.0, resumed=True)
        first, begin = killed_at // 5 * 5 + 1, end + 2.0
    end = run.train(begin, first, versions)
    run.roll(begin, end)
    if failure is None:
        run.evaluate(end + 0.6, versions, "end")
        run.finish(end + 1.0)
    else:
        run.emit(end + 1.0, "run_failed", reason=failure)
    return run.events()


@pytest.fixture
def make_events() -> Callable[..., list[Event]]:
    return synthetic_events


@pytest.fixture(scope="session")
def events_of_a_finished_run() -> list[Event]:
    return synthetic_events()


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes a run directory with synthetic events, and returns it."""

    def make(*, folder: str = "run", **options: Any) -> Path:
        run_dir = tmp_path / folder
        run_dir.mkdir()
        lines = [json.dumps(event) for event in synthetic_events(**options)]
        (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return run_dir

    return make
