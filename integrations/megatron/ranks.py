"""`score_on_ranks`: `score_answers` on several gloo ranks, each a process of its own."""

# Megatron-Core is installed beside the engine tests only.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file

from consistency import NumericsContract
from consistency.routing_replay import RoutingTrace
from integrations.errors import EngineConfigError
from integrations.megatron.batch import SampledAnswer

__all__ = ["score_on_ranks"]

_TIMEOUT = timedelta(minutes=5)


class _Job(msgspec.Struct, frozen=True):
    """What every rank is told; its answers lie beside it."""

    model: str
    operations: list[str] | None
    contract: str
    replay: bool
    prompts: list[list[int]]
    sequences: list[list[int]]
    traces: list[bytes | None]


@dataclass(frozen=True, slots=True)
class _Answer:
    prompt: list[int]
    sequence: list[int]
    trace: RoutingTrace | None


def score_on_ranks(
    model: str,
    answers: Sequence[SampledAnswer],
    operations: Sequence[str] | None,
    *,
    ranks: int,
    contract: NumericsContract,
    replay: bool = False,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Scores answers on `ranks` tensor-parallel ranks, sequence-parallel, in as many processes.

    Arguments and results are those of `scoring.score_answers`.

    Raises:
        EngineConfigError: a rank failed; its last line.
    """
    job = _Job(
        model,
        None if operations is None else list(operations),
        contract.to_json(),
        replay,
        [list(answer.prompt) for answer in answers],
        [list(answer.sequence) for answer in answers],
        [None if answer.trace is None else answer.trace.to_bytes() for answer in answers],
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job").write_bytes(msgspec.msgpack.encode(job))
        _run(folder, ranks)
        found = load_file(folder / "scores")
    logprobs = [found[f"logprobs.{index}"] for index in range(len(answers))]
    routes = [found[key] for index in range(len(answers)) if (key := f"routes.{index}") in found]
    return logprobs, routes


def _run(folder: Path, ranks: int) -> None:
    """Starts the ranks and waits for all; the first that fails takes the others with it."""
    logs = [folder / f"log.{rank}" for rank in range(ranks)]
    with ExitStack() as stack:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", __spec__.name, str(folder), str(rank), str(ranks)],
                stderr=stack.enter_context(log.open("wb")),
            )
            for rank, log in enumerate(logs)
        ]
        try:
            while any(process.poll() is None for process in processes):
                if any(process.returncode for process in processes):
                    break
                time.sleep(0.02)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    for process, log in zip(processes, logs, strict=True):
        if process.returncode > 0:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            reason = lines[-1] if lines else f"exit code {process.returncode}"
            raise EngineConfigError(f"a rank of Megatron-Core failed: {reason}")


def main(arguments: Sequence[str]) -> None:
    """One rank: a folder with a job, its number, and how many there are."""
    from megatron.core import parallel_state
    from torch import distributed
    from torch._C._distributed_c10d import FileStore

    from integrations.megatron.cpu import on_cpu
    from integrations.megatron.scoring import score_answers

    folder, rank, size = Path(arguments[0]), int(arguments[1]), int(arguments[2])
    job = msgspec.msgpack.decode((folder / "job").read_bytes(), type=_Job)
    answers = [
        _Answer(prompt, sequence, None if trace is None else RoutingTrace.from_bytes(trace))
        for prompt, sequence, trace in zip(job.prompts, job.sequences, job.traces, strict=True)
    ]
    with on_cpu():
        store = FileStore(str(folder / "store"), size)
        distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=_TIMEOUT
        )
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
        logprobs, routes = score_answers(
            job.model,
            answers,
            job.operations,
            contract=NumericsContract.from_json(job.contract),
            replay=job.replay,
        )
        if rank == 0:
            tensors = {f"logprobs.{i}": values.contiguous() for i, values in enumerate(logprobs)}
            tensors |= {f"routes.{i}": ids.contiguous() for i, ids in enumerate(routes)}
            save_file(tensors, folder / "scores")
        parallel_state.destroy_model_parallel()
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
