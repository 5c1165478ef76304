"""Outputs of every layer on both sides for one sequence, for `bench.divergence.locate`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file

from bench.divergence.locate import Difference, first_difference
from bench.divergence.rollout import Job
from integrations.errors import BenchError
from integrations.trainer.model.config import ModelConfig

__all__ = ["capture", "compare", "locate"]


def locate(
    job: Job, train_operations: Sequence[str] | None, train: str = "transformers"
) -> Difference | None:
    """Runs request 0 of a job on vLLM and its sequence on the trainer; where do they part?

    The prompt is prefilled in one step and the answer decoded token by token, so that an operation
    whose result depends on the batch is found as well.

    Args:
        job: of vLLM; its operations are routed there.
        train_operations: routed in the trainer; None for stock.
        train: "transformers" or "megatron".

    Raises:
        BenchError: the vLLM process failed.
    """
    return compare(job.model, capture(job), train_operations, train)


def capture(job: Job) -> dict[str, torch.Tensor]:
    """Outputs of every layer of vLLM for request 0 of a job, its sequence and its logprobs.

    Raises:
        BenchError: the vLLM process failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        request, result = Path(folder) / "job.msgpack", Path(folder) / "outputs.safetensors"
        request.write_bytes(msgspec.msgpack.encode(job))
        done = subprocess.run(
            [sys.executable, "-m", "bench.divergence.capture", str(request), str(result)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            raise BenchError(f"vLLM failed: {lines[-1] if lines else done.returncode}")
        return load_file(result)


def compare(
    model: str,
    captured: Mapping[str, torch.Tensor],
    train_operations: Sequence[str] | None,
    train: str,
) -> Difference | None:
    """Runs the sequence of `capture` on the trainer; where do the two part?

    Args:
        model: checkpoint folder.
        captured: what `capture` returned.
        train_operations, train: as in `locate`.
    """
    rollout = dict(captured)
    sequence = rollout.pop("sequence").tolist()
    sampled = rollout.pop("logprobs")
    config = ModelConfig.load(model)
    outputs_of = {"transformers": _transformers_outputs, "megatron": _megatron_outputs}[train]
    trained, norms, scored = outputs_of(model, sequence, train_operations)
    found = first_difference(config, rollout, trained, norms)
    if found is not None:
        return found
    differs = sampled != scored[-len(sampled) :]
    if bool(differs.any()):
        gap = float((sampled - scored[-len(sampled) :]).abs().max())
        return Difference(
            "logprobs", config.layers, "logprobs", int(differs.sum()), len(sampled), gap
        )
    return None


def _transformers_outputs(
    folder: str, sequence: list[int], operations: Sequence[str] | None
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
    from transformers import AutoModelForCausalLM

    from integrations.transformers import OPERATIONS, patch, score_tokens
    from integrations.transformers.activations import recorded_activations

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    if operations is not None:
        patch(model, operations=[name for name in operations if name in OPERATIONS])
    with torch.no_grad():
        (scored,) = score_tokens(model, [sequence])
        with recorded_activations(model) as outputs:
            model(input_ids=torch.tensor([sequence[:-1]]), use_cache=False)
    norms = {}
    for layer, block in enumerate(model.model.layers):
        if hasattr(block.self_attn, "q_norm"):
            norms[f"{layer}.q_norm"] = block.self_attn.q_norm.weight.detach()
            norms[f"{layer}.k_norm"] = block.self_attn.k_norm.weight.detach()
    return outputs, norms, scored


def _megatron_outputs(
    folder: str, sequence: list[int], operations: Sequence[str] | None
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
    from integrations.megatron.activations import head_norms, recorded_activations
    from integrations.megatron.loading import load_model
    from integrations.megatron.patching import OPERATIONS, patch
    from integrations.megatron.scoring import score_tokens, single_process

    with single_process(), torch.no_grad():
        model = load_model(folder)
        if operations is not None:
            patch(model, operations=[name for name in operations if name in OPERATIONS])
        with recorded_activations(model) as outputs:
            scores = score_tokens(model, [sequence])
        return outputs, head_norms(model), scores.logprobs[0]


def main(arguments: Sequence[str]) -> None:
    """The vLLM process: job file to a file of outputs."""
    from integrations.vllm.activations import recorded_activations
    from integrations.vllm.offline import OfflineEngine, Request
    from integrations.vllm.options import VllmOptions

    job = msgspec.msgpack.decode(Path(arguments[0]).read_bytes(), type=Job)
    workload = job.workload
    engine = OfflineEngine(
        job.model,
        VllmOptions(operations=tuple(job.operations or ())),
        max_length=-(-workload.longest // 32) * 32,
    )
    with recorded_activations(engine.runner) as outputs:
        (sample,) = engine.generate(
            [Request("locate", workload.prompts[0], workload.answer, workload.seed)]
        )
    tensors = {name: torch.cat(rows).contiguous() for name, rows in outputs.items()}
    tensors["sequence"] = torch.tensor(sample.sequence)
    tensors["logprobs"] = torch.tensor(sample.logprobs, dtype=torch.float32)
    save_file(tensors, arguments[1])
    engine.close()


if __name__ == "__main__":
    main(sys.argv[1:])
