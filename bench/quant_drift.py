"""`python -m bench.quant_drift RUN_DIR`: what each misaligned quantiser would have cost a run.

The learner of a run that trained on MXFP4 weights scores what an engine samples whose weights were
quantised from the same fp32 masters in another way. Everything else is equal, and both compute
under the numerics contract, so what is left is the quantiser's doing. The first row is the run as
it is.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from consistency import NumericsContract, mismatch_metrics
from consistency.errors import ConsistencyError
from consistency.quant import BLOCK, QuantSettings, ScaleRule, pack, qdq
from consistency.quant.alternatives import Alternative
from integrations.errors import BenchError, IntegrationError
from integrations.trainer.checkpoint import checkpoint_versions, load_state
from integrations.trainer.engine import RolloutEngine
from integrations.trainer.model import Decoder, ModelConfig
from integrations.trainer.model.weights import Weight
from integrations.trainer.recipe import load_recipe
from integrations.trainer.run import RECIPE_FILE
from integrations.trainer.sampling import group_requests
from integrations.trainer.scoring import score_trajectories
from integrations.trainer.tasks import TaskStream
from integrations.trainer.trajectory import GenerationRequest
from integrations.trainer.worker_learner import CHECKPOINTS
from integrations.trainer.worker_model import WorkerModel

ALIGNED = "aligned: packed weights, as trained"
NO_QDQ = "learner trains in bf16, engine serves MXFP4"

Quantiser = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; the fields are the keys of ``--json``.

    Attributes:
        engine: what is different.
        values_differ: share of the quantised weights whose values differ from the learner's.
        tokens: sampled tokens compared.
        exact_fraction, mean_abs_diff, max_abs_diff, k3_kl: as in `MismatchMetrics`.
        router_flip_rate: share of (row, layer) pairs sent to another set of experts.
    """

    engine: str
    values_differ: float
    tokens: int
    exact_fraction: float
    mean_abs_diff: float
    max_abs_diff: float
    k3_kl: float
    router_flip_rate: float


@dataclass(frozen=True)
class Case:
    """A model whose quantised weights are measured.

    Attributes:
        config, contract: of the model.
        masters: fp32, by in-memory name.
        quantised: names of the weights that the learner trains quantised, in order.
        settings: how.
        requests: what the engines sample.
    """

    config: ModelConfig
    contract: NumericsContract
    masters: Mapping[str, Tensor]
    quantised: tuple[str, ...]
    settings: QuantSettings
    requests: Sequence[GenerationRequest]


def measure(case: Case) -> Iterator[Row]:
    """One row per alternative, the aligned engine first.

    Raises:
        BenchError: the aligned engine is not exactly equal.
    """
    plain = {name: master.bfloat16() for name, master in case.masters.items()}
    trained = {name: qdq(plain[name], case.settings) for name in case.quantised}
    learner = {**plain, **trained}
    packed = {name: pack(plain[name], case.settings) for name in case.quantised}
    row = _compare(case, ALIGNED, {**plain, **packed}, learner, 0.0)
    if row.exact_fraction != 1:
        raise BenchError(f"the aligned engine is not exact ({row}): a defect, please report it")
    yield row
    total = sum(weight.numel() for weight in trained.values())
    for name, served in _served(case, plain, trained):
        differ = sum(int((served[key] != trained[key]).sum()) for key in case.quantised)
        yield _compare(case, name, {**plain, **served}, learner, differ / total)
    differ = sum(int((plain[key] != trained[key]).sum()) for key in case.quantised)
    yield _compare(case, NO_QDQ, {**plain, **packed}, plain, differ / total)


def quantisers(settings: QuantSettings) -> Iterator[tuple[str, Quantiser]]:
    """Every misaligned quantiser that is measured, with its name: fp32 master to values."""
    rule = settings.scale_rule
    others: list[Alternative] = [
        *(Alternative(other) for other in ScaleRule if other is not rule),
        Alternative("log2"),
        Alternative(rule, "away"),
        Alternative(rule, "zero"),
        Alternative(rule, source_dtype="float32"),
        Alternative(rule, axis=-2),
        Alternative(rule, through_fp8=True),
    ]
    for alternative in others:
        yield alternative.difference(settings), alternative.qdq
    generator = torch.Generator().manual_seed(0)
    stochastic = Alternative(rule, "stochastic")
    yield stochastic.difference(settings), lambda master: stochastic.qdq(master, generator)
    for ranks in (2, 8):
        yield (
            f"blocks cut at the boundaries of {ranks} tensor-parallel ranks",
            lambda master, ranks=ranks: cut_blocks(master, settings, ranks),
        )


def cut_blocks(master: Tensor, settings: QuantSettings, ranks: int) -> Tensor:
    """The values if every rank quantises its own share of the contraction axis.

    Args:
        master: fp32 [..., K], K a multiple of `ranks`.
        settings: the quantiser's.
        ranks: blocks begin anew at every rank's share; its last one may be short.

    Returns:
        bf16, the shape of `master`.
    """
    share = master.shape[-1] // ranks
    padded = functional.pad(master.unflatten(-1, (ranks, share)), (0, -share % BLOCK))
    return qdq(padded, settings, out_dtype=torch.bfloat16)[..., :share].flatten(-2)


def case_of_run(folder: Path, *, prompts: int, samples: int) -> Case:
    """The newest checkpoint of a run, and requests for prompts of its task.

    Raises:
        BenchError: the folder is no run, it has no checkpoint, or it did not train quantised.
        IntegrationError: its recipe or checkpoint cannot be read.
    """
    if not (folder / RECIPE_FILE).is_file():
        raise BenchError(f"{folder} is no run: it has no {RECIPE_FILE}")
    recipe = load_recipe(folder / RECIPE_FILE, [])
    model = WorkerModel.of(recipe)
    if model.quantiser is None:
        raise BenchError(f"{folder}: the run did not quantise; use one of recipes/mxfp4.yaml")
    versions = checkpoint_versions(folder / CHECKPOINTS)
    if not versions:
        raise BenchError(f"{folder}: the run has no checkpoint")
    groups, _ = load_state(folder / CHECKPOINTS, versions[-1])
    tasks, tokenizer = TaskStream(recipe.task), model.tokenizer()
    requests = [
        request
        for index in range(prompts)
        for request in group_requests(recipe, tokenizer, tasks.prompt(index), range(samples))
    ]
    return Case(
        model.config,
        model.contract,
        groups["master"],
        model.quantiser.names,
        model.quantiser.settings,
        requests,
    )


def _served(
    case: Case, plain: Mapping[str, Tensor], trained: Mapping[str, Tensor]
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Name and quantised weights of every misaligned engine."""
    for name, quantise in quantisers(case.settings):
        yield name, {key: quantise(case.masters[key]).bfloat16() for key in case.quantised}
    last = case.quantised[-1]
    yield f"{last} left in bf16", {**trained, last: plain[last]}


def _compare(
    case: Case,
    name: str,
    served: Mapping[str, Weight],
    learner: Mapping[str, Tensor],
    values_differ: float,
) -> Row:
    engine = RolloutEngine(
        case.config, case.contract, served, 0, blocks=4096, block_size=16, max_running=512
    )
    trajectories = engine.generate(case.requests)
    scores = score_trajectories(Decoder(case.config, case.contract), {0: learner}, trajectories)
    ours = torch.cat([score.logprobs for score in scores])
    theirs = torch.tensor([lp for t in trajectories for lp in t.logprobs], dtype=torch.float32)
    drift = mismatch_metrics(ours, theirs)
    pairs = sum(score.compared for score in scores)
    return Row(
        engine=name,
        values_differ=values_differ,
        tokens=ours.numel(),
        exact_fraction=drift.exact_fraction,
        mean_abs_diff=drift.mean_abs_diff,
        max_abs_diff=drift.max_abs_diff,
        k3_kl=drift.k3_kl,
        router_flip_rate=sum(score.flips for score in scores) / pairs if pairs else 0.0,
    )


def main(given: Sequence[str] | None = None) -> int:
    """Prints the table as Markdown; returns the exit code."""
    options = argparse.ArgumentParser(prog="bench.quant_drift", description=__doc__)
    options.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    options.add_argument("--prompts", type=int, default=128)
    options.add_argument("--samples", type=int, default=8, help="answers per prompt")
    options.add_argument("--json", type=Path, metavar="FILE")
    arguments = options.parse_args(given)
    rows = []
    try:
        case = case_of_run(arguments.run_dir, prompts=arguments.prompts, samples=arguments.samples)
        print("| engine | weights differ | tokens | exact | mean diff | max | k3 | router flips |")
        print("|---|---|---|---|---|---|---|---|")
        for row in measure(case):
            rows.append(asdict(row))
            print(
                f"| {row.engine} | {row.values_differ:.2%} | {row.tokens} "
                f"| {row.exact_fraction:.3g} | {row.mean_abs_diff:.2g} | {row.max_abs_diff:.2g} "
                f"| {row.k3_kl:.2g} | {row.router_flip_rate:.2%} |",
                flush=True,
            )
    except (IntegrationError, ConsistencyError) as error:
        print(f"bench.quant_drift: {error}", file=sys.stderr)
        return 2
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
