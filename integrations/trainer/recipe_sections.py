"""The sections of a recipe: one frozen pydantic model each, with the limits of every field.

Nothing is converted in silence: types are strict (``steps: "20"`` is an error), unknown keys are
errors, and infinities are errors. Conditions that involve two fields are checked where both are
known: inside one section here, across sections in `recipe_schema`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

__all__ = [
    "CheckpointRecipe",
    "ContractRecipe",
    "DriftRecipe",
    "EvaluationRecipe",
    "LearnerRecipe",
    "ModelRecipe",
    "QuantisationRecipe",
    "RolloutRecipe",
    "SamplingRecipe",
    "Section",
    "StalenessRecipe",
    "TaskRecipe",
    "TokenizerRecipe",
    "WarmStartRecipe",
    "WatchdogRecipe",
    "problem",
]


def problem(path: str, text: str) -> PydanticCustomError:
    """An error about the field at ``path`` (dotted, from the top of the recipe)."""
    return PydanticCustomError("recipe", "{text}", {"path": path, "text": text})


def _list_to_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _engine_name_to_section(value: Any) -> Any:
    """``rollout: embedded`` is short for ``rollout: {engine: embedded}``."""
    return {"engine": value} if isinstance(value, str) else value


class Section(BaseModel):
    """Base of every section."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


Count = Annotated[int, Field(ge=1)]
Interval = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(min_length=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class ModelRecipe(Section):
    """Where the model comes from: exactly one of ``path``, ``package`` and ``random``."""

    path: Text | None = None
    """Folder with ``config.json`` and safetensors files."""
    package: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    """Installed package that carries one GGUF file; imported once into ``models/<package>``."""
    random: dict[str, JsonValue] | None = None
    """A ``config.json`` as a mapping; weights are drawn from the recipe's seed."""

    @model_validator(mode="after")
    def _exactly_one(self) -> ModelRecipe:
        given = [name for name in ("path", "package", "random") if getattr(self, name) is not None]
        if not given:
            raise problem("model", "names no model; set one of path, package, random")
        if len(given) > 1:
            raise problem(
                "model",
                f"{' and '.join(given)} are both set; keep one and set the other to null",
            )
        return self


class TokenizerRecipe(Section):
    """How text becomes token ids."""

    kind: Literal["characters", "bytes", "huggingface"]
    path: Text | None = None
    """Folder of a huggingface tokenizer; null takes the model's folder."""
    alphabet: Text | None = None
    """The characters that the ``characters`` tokenizer knows."""

    @model_validator(mode="after")
    def _fits_its_kind(self) -> TokenizerRecipe:
        if self.kind == "characters":
            if self.alphabet is None:
                raise problem(
                    "tokenizer.alphabet", "missing; the characters tokenizer needs its characters"
                )
            for index, character in enumerate(self.alphabet):
                if character in self.alphabet[:index]:
                    raise problem(
                        "tokenizer.alphabet", f"holds {character!r} twice; every character once"
                    )
        elif self.alphabet is not None:
            raise problem(
                "tokenizer.alphabet", f"is set, but the {self.kind} tokenizer has none; remove it"
            )
        if self.path is not None and self.kind != "huggingface":
            raise problem(
                "tokenizer.path", f"is set, but the {self.kind} tokenizer reads no file; remove it"
            )
        return self

    @property
    def vocab_size(self) -> int | None:
        """Number of token ids, known without a file for every kind but huggingface."""
        if self.kind == "bytes":
            return 257
        return None if self.alphabet is None else len(self.alphabet) + 1


class TaskRecipe(Section):
    """A reasoning-gym task with its verifier."""

    name: Text
    """Name of the reasoning-gym dataset."""
    config: dict[str, JsonValue] = Field(default_factory=dict)
    """Arguments of that dataset, except ``seed`` and ``size``."""
    seed: Seed = 0
    held_out: Count = 128
    """Number of prompts that are kept for evaluation and never trained on."""
    prompt: str = "{question}"
    """What the model reads; ``{question}`` stands for the question."""
    strip_prefix: str = ""
    """Text that every question of the dataset begins with and that the model need not read."""
    system: Text | None = None
    """System message, for tokenizers with a chat template."""

    @field_validator("prompt")
    @classmethod
    def _asks_the_question(cls, value: str) -> str:
        if value.count("{question}") != 1:
            raise problem(
                "task.prompt",
                f"holds {{question}} {value.count('{question}')} times; it must hold it once",
            )
        return value

    @field_validator("config")
    @classmethod
    def _leaves_seed_and_size_alone(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        for key, instead in (("seed", "set task.seed"), ("size", "a task never ends; remove it")):
            if key in value:
                raise problem(f"task.config.{key}", f"cannot be set here; {instead}")
        return value


class WarmStartRecipe(Section):
    """Supervised steps on the tasks' own answers before reinforcement learning begins."""

    steps: Count
    batch_size: Count = 64
    learning_rate: Positive = 1e-3
    final_learning_rate: NotNegative = 0.0
    """The learning rate falls to this, linearly."""


class SamplingRecipe(Section):
    """How responses are sampled for training; evaluation is greedy."""

    temperature: Positive = 1.0
    max_new_tokens: Count


class RolloutRecipe(Section):
    """The rollout engine and its resources."""

    engine: Literal["embedded"] = "embedded"
    replicas: Count = 1
    threads: Count = 1
    """Threads of each replica."""
    max_running: Count = 64
    """Requests that one replica decodes at the same time."""
    blocks: Count = 1024
    """KV blocks of one replica."""
    block_size: Count = 16
    """Tokens of one KV block."""
    prefill_chunk: Count = 512
    """Prompt tokens that one pass takes in at most."""
    swap_policy: Literal["continue_with_kv", "re_prefill", "finish_on_old"] = "continue_with_kv"
    """What happens to running requests when new weights are committed."""

    @model_validator(mode="after")
    def _every_running_request_has_a_block(self) -> RolloutRecipe:
        if self.blocks < self.max_running:
            raise problem(
                "rollout.blocks",
                f"is {self.blocks}, too few for {self.max_running} running requests; "
                "raise it or lower rollout.max_running",
            )
        return self


class LearnerRecipe(Section):
    """The learner, its optimiser and its objective."""

    engine: Literal["embedded"] = "embedded"
    threads: Count = 1
    steps: Count
    """Weight versions to train; step s makes version s."""
    groups_per_step: Count = 16
    """Prompts of one step."""
    samples_per_group: Annotated[int, Field(ge=2)] = 8
    """Responses to each prompt; every advantage compares them, so there are at least two."""
    minibatches: Count = 1
    """Optimiser updates of one step."""
    micro_batch_tokens: Count = 4096
    """Tokens of one forward pass."""
    learning_rate: Positive = 1e-3
    schedule: Literal["constant", "linear"] = "constant"
    """Of the learning rate after its rise; ``linear`` falls to 0 at the end of the last step."""
    weight_decay: NotNegative = 0.0
    betas: Annotated[tuple[Fraction, Fraction], BeforeValidator(_list_to_tuple)] = (0.9, 0.95)
    gradient_clip: Positive = 1.0
    clip_low: Fraction = 0.2
    clip_high: Positive = 0.28
    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    warmup_steps: Interval = 0
    """Steps over which the learning rate rises linearly from zero."""

    @model_validator(mode="after")
    def _divides_evenly(self) -> LearnerRecipe:
        if self.groups_per_step % self.minibatches:
            raise problem(
                "learner.minibatches",
                f"is {self.minibatches}, which does not divide learner.groups_per_step "
                f"({self.groups_per_step})",
            )
        return self


class StalenessRecipe(Section):
    """How old the weights that sampled a token may be when it is trained on."""

    max: Interval = 2
    """In weight versions; 0 is synchronous training."""


class DriftRecipe(Section):
    """The exact audit: tokens are scored again under the very versions that sampled them."""

    every: Interval = 1
    """Audit the batch of every n-th step; 0 never."""
    trajectories: Count = 32
    """Trajectories of that batch."""


class EvaluationRecipe(Section):
    """Greedy evaluation on held-out prompts."""

    every: Interval = 10
    """Every n-th version; 0 only before the first and after the last step."""
    prompts: Count = 128


class CheckpointRecipe(Section):
    """When to save everything that a resume needs."""

    every: Count = 5
    """Every n-th version, and the last one."""
    keep: Count = 2
    """Checkpoints that stay on disk."""


class WatchdogRecipe(Section):
    """When a silent process counts as dead."""

    seconds: Positive = 120.0


class QuantisationRecipe(Section):
    """Weights that are trained and served quantised; the rest of the model stays in bf16."""

    format: Literal["mxfp4"] = "mxfp4"
    scale_rule: Literal["floor", "even", "rceil", "ceil"]
    """How a block's scale follows from its largest magnitude; there is no default, because every
    library has another one."""
    targets: Literal["experts", "linears"] = "experts"
    """``experts``: the expert weights. ``linears``: those, and every other linear but the router,
    the embedding and the LM head."""
    exclude: Annotated[tuple[Text, ...], BeforeValidator(_list_to_tuple)] = ()
    """Full names of in-memory tensors that stay in bf16."""


class ContractRecipe(Section):
    """Choices of the numerics contract."""

    tp_invariant: bool = False


RolloutSection = Annotated[RolloutRecipe, BeforeValidator(_engine_name_to_section)]
LearnerSection = Annotated[LearnerRecipe, BeforeValidator(_engine_name_to_section)]
