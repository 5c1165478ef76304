"""Runs the scenarios on a rollout engine, and checks that each of them happened."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from bench.divergence.sample import Answer, read_answers, write_answers
from bench.divergence.scenarios import SCENARIOS, Scenario, Workload
from consistency import NumericsContract
from integrations.errors import BenchError
from integrations.trainer.engine import RolloutEngine
from integrations.trainer.model.checkpoint import load_checkpoint
from integrations.trainer.model.config import ModelConfig
from integrations.trainer.trajectory import GenerationRequest, Trajectory

if TYPE_CHECKING:
    from integrations.vllm.offline import OfflineEngine

__all__ = ["Job", "run_embedded", "run_vllm"]

_BLOCK = 32


class Job(msgspec.Struct, frozen=True):
    """What a rollout process is told.

    Attributes:
        model: checkpoint folder.
        scenarios: names, in order.
        operations: routed to the contract; None for the stock engine.
        prompts, answer, seed: as in `Workload`.
        tp_invariant: as in `NumericsContract`.
    """

    model: str
    scenarios: list[str]
    operations: list[str] | None
    prompts: list[list[int]]
    answer: int
    seed: int
    tp_invariant: bool = False

    @property
    def contract(self) -> NumericsContract:
        """What both sides compute under, unless they are stock."""
        return NumericsContract(tp_invariant=self.tp_invariant)

    @property
    def workload(self) -> Workload:
        """The requests."""
        return Workload(tuple(map(tuple, self.prompts)), self.answer, self.seed)


def run_vllm(job: Job) -> dict[str, list[Answer]]:
    """The scenarios on vLLM, in a process of their own, where it may set up torch as it likes.

    Raises:
        BenchError: the process failed; its last line.
    """
    with tempfile.TemporaryDirectory() as folder:
        request, result = Path(folder) / "job.msgpack", Path(folder) / "answers.msgpack"
        request.write_bytes(msgspec.msgpack.encode(job))
        done = subprocess.run(
            [sys.executable, "-m", "bench.divergence.rollout", str(request), str(result)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            raise BenchError(f"vLLM failed: {lines[-1] if lines else done.returncode}")
        return read_answers(result)


def _serve_vllm(job: Job) -> dict[str, list[Answer]]:
    """`run_vllm` inside the process."""
    from integrations.vllm.offline import OfflineEngine
    from integrations.vllm.options import VllmOptions

    workload = job.workload
    options = None
    if job.operations is not None:
        options = VllmOptions(operations=tuple(job.operations), tp_invariant=job.tp_invariant)
    if job.operations is None and ModelConfig.load(job.model).moe_layers:
        options = VllmOptions(operations=())  # stock kernels, but its routes are recorded
    engine = OfflineEngine(
        job.model,
        options,
        max_length=-(-workload.longest // _BLOCK) * _BLOCK,
        max_running=len(workload.prompts),
        block_size=_BLOCK,
    )
    try:
        return {
            name: _run_scenario(
                engine, SCENARIOS[name], workload, f"{index}", seeded=job.operations is not None
            )
            for index, name in enumerate(job.scenarios)
        }
    finally:
        engine.close()


def _run_scenario(
    engine: OfflineEngine, scenario: Scenario, workload: Workload, tag: str, *, seeded: bool
) -> list[Answer]:
    from integrations.vllm.offline import Request

    # Stock vLLM dies of a seeded request whose prompt is prefilled in chunks on the CPU.
    requests = [
        Request(
            f"{tag}.{index}", prompt, workload.answer, workload.seed + index if seeded else None
        )
        for index, prompt in enumerate(workload.prompts)
    ]
    with ExitStack() as stack:
        if scenario.chunk is not None:
            stack.enter_context(engine.chunks_of(scenario.chunk))
        engine.forget_prefixes()
        if scenario.scarce:
            blocks = sum(-(-(len(p) + workload.answer) // _BLOCK) for p in workload.prompts) // 2
            stack.enter_context(engine.free_blocks(blocks))
        if scenario.warm:
            engine.generate(
                [Request(f"warm.{request.name}", request.prompt, 1, None) for request in requests]
            )
        preemptions = stack.enter_context(engine.counted_preemptions())
        if scenario.solo:
            samples = []
            for request in requests:
                engine.forget_prefixes()
                samples += engine.generate([request])
        else:
            samples = engine.generate(requests, stagger=scenario.stagger)
        if scenario.scarce and not preemptions[0]:
            raise BenchError(f"scenario {scenario.name!r}: no request was preempted")
    if scenario.warm and not any(sample.cached_tokens for sample in samples):
        raise BenchError(f"scenario {scenario.name!r}: no prompt was found in the prefix cache")
    return [
        Answer(sample.request.prompt, sample.tokens, sample.logprobs, sample.trace)
        for sample in samples
    ]


def run_embedded(job: Job) -> dict[str, list[Answer]]:
    """The scenarios on the embedded engine, which knows nothing but the contract."""
    config, weights = load_checkpoint(job.model)
    workload = job.workload
    answers = {}
    for name in job.scenarios:
        with torch.no_grad():
            answers[name] = _run_embedded_scenario(
                config, job.contract, weights, SCENARIOS[name], workload
            )
    return answers


def _run_embedded_scenario(
    config: ModelConfig,
    contract: NumericsContract,
    weights: Mapping[str, torch.Tensor],
    scenario: Scenario,
    workload: Workload,
) -> list[Answer]:
    block = 16
    blocks = sum(-(-(len(p) + workload.answer) // block) + 1 for p in workload.prompts)
    longest = -(-workload.longest // block) + 1
    engine = RolloutEngine(
        config,
        contract,
        weights,
        0,
        blocks=max(blocks // 3, longest) if scenario.scarce else 2 * blocks,
        block_size=block,
        max_running=1 if scenario.solo else len(workload.prompts),
        prefill_chunk=scenario.chunk or 4096,
    )

    def requests(prefix: str, answer: int) -> list[GenerationRequest]:
        return [
            GenerationRequest(f"{prefix}{index}", prompt, answer, 1.0, workload.seed + index)
            for index, prompt in enumerate(workload.prompts)
        ]

    if scenario.warm:
        _drain(engine, requests("warm", 1), 0)
    finished = _drain(engine, requests("", workload.answer), scenario.stagger)
    return [
        Answer(
            trajectory.token_ids[: trajectory.prompt_length],
            trajectory.response_ids,
            tuple(trajectory.logprobs),
            trajectory.routing,
        )
        for trajectory in (finished[str(index)] for index in range(len(workload.prompts)))
    ]


def _drain(
    engine: RolloutEngine, requests: Sequence[GenerationRequest], stagger: int
) -> dict[str, Trajectory]:
    waiting, step = list(requests), 0
    finished: dict[str, Trajectory] = {}
    while len(finished) < len(requests):
        while waiting and (stagger == 0 or step % stagger == 0):
            engine.submit(waiting.pop(0))
            if stagger:
                break
        for output in engine.step():
            if output.trajectory is not None:
                finished[output.request_id] = output.trajectory
        step += 1
    return finished


def main(arguments: Sequence[str]) -> None:
    """A rollout process: job file to answers file."""
    job = msgspec.msgpack.decode(Path(arguments[0]).read_bytes(), type=Job)
    write_answers(Path(arguments[1]), _serve_vllm(job))


if __name__ == "__main__":
    main(sys.argv[1:])
