"""Ranks of Megatron-Core over gloo: one alone, then two in every way that two can share a model.

Started by test_megatron_parallel.py as `python megatron_ranks.py FOLDER DENSE MOE`. A rank writes
FOLDER/MODEL.CASE.RANK for every model and case. The ranks are forks of one process, which has
imported Megatron-Core for all of them.
"""

# Megatron-Core is installed beside the engine tests only.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from safetensors.torch import save_file
from torch import distributed
from torch._C._distributed_c10d import FileStore

from consistency import NumericsContract
from consistency.routing_replay import RoutingTrace
from integrations.megatron.batch import Batch
from integrations.megatron.cpu import on_cpu
from integrations.megatron.layout import fill_arena, ranks_layout
from integrations.megatron.loading import current_place, load_model
from integrations.megatron.model import ModelOptions
from integrations.megatron.patching import patch
from integrations.megatron.replay import replay_routes
from integrations.megatron.scoring import score_tokens
from integrations.trainer.model.config import ModelConfig

ALONE = {"alone": {}}
PAIRS = {
    "tp": {"tensor_model_parallel_size": 2},
    "sp": {"tensor_model_parallel_size": 2},
    "pp": {"pipeline_model_parallel_size": 2},
    "ep": {"expert_model_parallel_size": 2},
    "sp-ep": {
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
}
CONTRACT = NumericsContract(tp_invariant=True)


def sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 512, (n,), generator=generator).tolist() for n in (33, 20, 41, 27)]


def shifted(routes: list[torch.Tensor], experts: int) -> list[RoutingTrace]:
    """Traces that send every token elsewhere than the live router does; one token has no route."""
    traces = []
    for ids in routes:
        valid = torch.ones(len(ids), dtype=torch.bool)
        valid[3] = False
        traces.append(
            RoutingTrace.of(
                (ids + 1) % experts,
                layers=range(ids.shape[1]),
                experts=experts,
                weight_version=0,
                origin="generated",
                valid=valid,
            )
        )
    return traces


def numbered(name: str, values) -> dict[str, torch.Tensor]:
    return {f"{name}.{i}": value.detach().contiguous() for i, value in enumerate(values)}


def gradients(model) -> dict[str, torch.Tensor]:
    found = {f"grad.{n}": p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    return found


def loss(model, rows) -> torch.Tensor:
    """Megatron-Core's loss of each token, ``[b, s]``: minus its log-probability."""
    batch = Batch(tuple(len(row) - 1 for row in rows))
    ids = batch.token_ids([row[:-1] for row in rows])
    targets = batch.token_ids([row[1:] for row in rows])
    return model(
        ids, torch.arange(batch.width).expand(ids.shape), None, labels=targets
    ).contiguous()


def train(model, batches, traces) -> None:
    """One step of Megatron-Core's schedule over two micro-batches, with replay and recompute."""
    micro = [Batch(tuple(len(row) - 1 for row in rows)) for rows in batches]

    def step(data, stage):
        batch, rows = next(data)
        ids = batch.token_ids([row[:-1] for row in rows])
        targets = batch.token_ids([row[1:] for row in rows])
        output = stage(ids, torch.arange(batch.width).expand(ids.shape), None, labels=targets)
        return output, lambda loss: (loss.sum(), {})

    with replay_routes(model, list(zip(micro, traces, strict=True))):
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(list(zip(micro, batches, strict=True))),
            model=[model],
            num_microbatches=2,
            seq_length=micro[0].width,
            micro_batch_size=2,
        )


def run(name: str, case: str, folder: str, rank: int) -> dict[str, torch.Tensor]:
    rows, sparse = sequences(), name == "moe"
    if case == "ep" and rank:  # data-parallel ranks have batches of their own
        rows = rows[::-1]
    options = ModelOptions(sequence_parallel=case.startswith("sp"))
    model = load_model(folder, options).train()
    patch(model, contract=CONTRACT)
    layout = ranks_layout(ModelConfig.load(folder), {"this rank": current_place()})
    arena = torch.from_numpy(fill_arena(model, layout, "this rank"))
    scores = score_tokens(model, rows, record=sparse)
    found = numbered("logprobs", scores.logprobs) | numbered("routes", scores.routes)
    found["arena"] = arena
    if case != "pp":
        torch.cat(scores.logprobs).sum().backward()
        found |= gradients(model)
        with torch.no_grad():
            found["loss"] = loss(model, rows)
    if not sparse:
        return found
    traces = shifted(scores.routes, model.config.num_moe_experts)
    replayed = score_tokens(model, rows, record=True, traces=traces)
    found |= numbered("replayed", replayed.logprobs) | numbered("used", replayed.routes)
    if case != "pp":
        torch.cat(replayed.logprobs).sum().backward()
        found |= {f"replay.{n}": v for n, v in gradients(model).items() if "router" in n}
    if case in ("alone", "pp"):
        recomputing = load_model(folder, ModelOptions(recompute=True)).train()
        patch(recomputing, contract=CONTRACT)
        # Widths of both micro-batches must be equal: the pipeline passes one shape on.
        pairs = [[rows[2], rows[0]], [rows[2], rows[3]]]
        train(recomputing, pairs, [[traces[2], traces[0]], [traces[2], traces[3]]])
        found |= {f"step.{n}": v for n, v in gradients(recomputing).items()}
    stock = load_model(folder, options)
    if case in ("tp", "sp", "sp-ep"):
        stock.eval()  # Megatron-Core trains MoE on several ranks with sequence parallelism only
    with torch.no_grad():
        replayed = score_tokens(stock, rows, record=True, traces=traces)
    return found | numbered("stock.used", replayed.routes)


def rank_process(rank: int, size: int, folder: Path, models: dict[str, str]) -> None:
    torch.set_num_threads(1)
    with on_cpu():
        store = FileStore(str(folder / f"store{size}"), size)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
        for case, sizes in (ALONE if size == 1 else PAIRS).items():
            for name, model in models.items():
                if name == "dense" and "ep" in case:
                    continue
                parallel_state.initialize_model_parallel(**sizes)
                save_file(run(name, case, model, rank), folder / f"{name}.{case}.{rank}")
                parallel_state.destroy_model_parallel()


def main(arguments: list[str]) -> int:
    folder, dense, moe = Path(arguments[0]), arguments[1], arguments[2]
    models: dict[str, str] = {"dense": dense, "moe": moe}
    failed = 0
    for size in (1, 2):
        children = []
        for rank in range(size):
            child = os.fork()
            if child == 0:
                try:
                    rank_process(rank, size, folder, models)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            children.append(child)
        failed += sum(os.waitpid(child, 0)[1] != 0 for child in children)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
