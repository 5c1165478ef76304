"""`Recipe`: everything that decides a training run, validated as a whole."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any

from pydantic import Field, model_validator

from integrations.trainer.recipe_corrections import CorrectionRecipe, TokenTisCorrection
from integrations.trainer.recipe_sections import (
    CheckpointRecipe,
    ContractRecipe,
    DriftRecipe,
    EvaluationRecipe,
    LearnerSection,
    ModelRecipe,
    QuantisationRecipe,
    RolloutRecipe,
    RolloutSection,
    SamplingRecipe,
    Section,
    Seed,
    StalenessRecipe,
    TaskRecipe,
    Text,
    TokenizerRecipe,
    WarmStartRecipe,
    WatchdogRecipe,
    problem,
)
from integrations.trainer.recipe_yaml import to_yaml_text

__all__ = ["CHANGEABLE_ON_RESUME", "Recipe"]

CHANGEABLE_ON_RESUME = (
    "name",
    "run_dir",
    "learner.steps",
    "learner.threads",
    "rollout",
    "staleness",
    "drift",
    "evaluation",
    "checkpoint",
    "watchdog",
)
"""Fields and sections that a resumed run may change: none of them alters how a step that the
journal has planned turns into weights, or what a prompt index stands for."""


class Recipe(Section):
    """A training run. Relative paths start at the working directory."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    seed: Seed = 0
    run_dir: Text
    """Where the run writes; ``runs/<name>`` when left out."""
    model: ModelRecipe
    tokenizer: TokenizerRecipe
    task: TaskRecipe
    warm_start: WarmStartRecipe | None = None
    sampling: SamplingRecipe
    rollout: RolloutSection = RolloutRecipe()
    learner: LearnerSection
    staleness: StalenessRecipe = StalenessRecipe()
    correction: CorrectionRecipe = TokenTisCorrection()
    routing_replay: bool = True
    """Replay the rollout's expert choices in the learner (MoE models)."""
    quantisation: QuantisationRecipe | None = None
    drift: DriftRecipe = DriftRecipe()
    evaluation: EvaluationRecipe = EvaluationRecipe()
    checkpoint: CheckpointRecipe = CheckpointRecipe()
    watchdog: WatchdogRecipe = WatchdogRecipe()
    contract: ContractRecipe = ContractRecipe()

    @model_validator(mode="before")
    @classmethod
    def _default_run_dir(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("run_dir") is None and "name" in data:
            return {**data, "run_dir": f"runs/{data['name']}"}
        return data

    @model_validator(mode="after")
    def _sections_fit_together(self) -> Recipe:
        self._tokenizer_fits_the_model()
        self._sizes_fit()
        if self.task.system is not None and self.tokenizer.kind != "huggingface":
            raise problem(
                "task.system",
                f"is set, but the {self.tokenizer.kind} tokenizer has no chat template; remove it",
            )
        if self.evaluation.prompts > self.task.held_out:
            raise problem(
                "evaluation.prompts",
                f"is {self.evaluation.prompts}, but task.held_out keeps only "
                f"{self.task.held_out}; lower one or raise the other",
            )
        if self.learner.warmup_steps > self.learner.steps:
            raise problem(
                "learner.warmup_steps",
                f"is {self.learner.warmup_steps}, above learner.steps ({self.learner.steps})",
            )
        return self

    def _tokenizer_fits_the_model(self) -> None:
        if self.model.random is None:
            return
        if self.tokenizer.kind == "huggingface" and self.tokenizer.path is None:
            raise problem(
                "tokenizer.path", "missing; a random model has no folder to take a tokenizer from"
            )
        known, given = self.tokenizer.vocab_size, self.model.random.get("vocab_size")
        if known is not None and isinstance(given, int) and given < known:
            raise problem(
                "model.random.vocab_size",
                f"is {given}, but the tokenizer has {known} ids (its characters and an end token); "
                "raise it or leave it out",
            )

    def _sizes_fit(self) -> None:
        # The shortest trajectory that can reach max_new_tokens has one prompt token.
        longest = self.sampling.max_new_tokens + 1
        capacity = self.rollout.blocks * self.rollout.block_size
        if capacity < longest:
            raise problem(
                "rollout.blocks",
                f"is {self.rollout.blocks}: {capacity} tokens of KV cache cannot hold one request "
                f"of sampling.max_new_tokens ({self.sampling.max_new_tokens}) and its prompt",
            )
        if self.learner.micro_batch_tokens < longest:
            raise problem(
                "learner.micro_batch_tokens",
                f"is {self.learner.micro_batch_tokens}, too small for one trajectory: "
                f"sampling.max_new_tokens is {self.sampling.max_new_tokens} and the prompt comes "
                "on top",
            )
        positions = (self.model.random or {}).get("max_position_embeddings")
        if isinstance(positions, int) and positions < longest:
            raise problem(
                "model.random.max_position_embeddings",
                f"is {positions}, below sampling.max_new_tokens "
                f"({self.sampling.max_new_tokens}) and a prompt",
            )

    def to_mapping(self) -> dict[str, Any]:
        """The resolved recipe as plain data, every default written out."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """The resolved recipe as YAML that `load_recipe` reads back to an equal recipe."""
        return to_yaml_text(self.to_mapping())

    def digest(self) -> str:
        """16 hex digits of BLAKE2b over the canonical JSON of the resolved recipe."""
        text = json.dumps(self.to_mapping(), sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def resume_difference(self, other: Recipe) -> tuple[str, ...]:
        """Fields that differ from ``other`` although a resumed run must keep them.

        Args:
            other: the recipe that the run in the run directory was started with.

        Returns:
            Dotted names in the order of the schema; empty when a resume is allowed. What may change
            is listed in `CHANGEABLE_ON_RESUME`.
        """
        mine, theirs = _flatten(self.to_mapping()), _flatten(other.to_mapping())
        absent = object()
        return tuple(
            name
            for name in dict.fromkeys((*mine, *theirs))
            if mine.get(name, absent) != theirs.get(name, absent) and not _changeable(name)
        )


def _changeable(name: str) -> bool:
    return any(name == field or name.startswith(f"{field}.") for field in CHANGEABLE_ON_RESUME)


def _flatten(mapping: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, dict) and value:
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat
