from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from integrations.errors import TaskError
from integrations.trainer.recipe_sections import TaskRecipe
from integrations.trainer.tasks import TaskStream

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def recipe(**options: Any) -> TaskRecipe:
    return TaskRecipe(**({"name": "chain_sum", "config": ONE_DIGIT, "held_out": 64} | options))


@pytest.fixture(scope="module")
def stream() -> TaskStream:
    return TaskStream(recipe())


def test_no_question_is_both_trained_on_and_evaluated(stream: TaskStream) -> None:
    """There are only 200 different questions, so a third of all draws has to be replaced."""
    held_out = {stream.held_out(index).text for index in range(stream.held_out_count)}
    trained = {stream.prompt(index).text for index in range(3000)}
    assert len(held_out) == 64
    assert len(trained) > 100
    assert not held_out & trained


def test_a_prompt_index_stands_for_the_same_question_in_every_process_and_order(
    stream: TaskStream,
) -> None:
    code = (
        "import json, sys\n"
        "from integrations.trainer.recipe_sections import TaskRecipe\n"
        "from integrations.trainer.tasks import TaskStream\n"
        "stream = TaskStream(TaskRecipe(**json.loads(sys.argv[1])))\n"
        "order = [5000, 3, 0, 1023, 1024, 9_000_000]\n"
        "print(json.dumps([stream.prompt(i).text for i in order] + [stream.held_out(7).text]))\n"
    )
    argument = json.dumps(recipe().model_dump())
    out = subprocess.run(
        [sys.executable, "-c", code, argument], capture_output=True, text=True, check=True
    )
    order = (0, 3, 1023, 1024, 5000, 9_000_000)
    here = {index: stream.prompt(index).text for index in order}
    assert json.loads(out.stdout) == [
        *(here[index] for index in (5000, 3, 0, 1023, 1024, 9_000_000)),
        stream.held_out(7).text,
    ]


def test_neighbouring_seeds_give_unrelated_streams() -> None:
    wide = {"min_terms": 4, "max_terms": 6, "min_digits": 3, "max_digits": 4}
    texts = [
        {TaskStream(recipe(config=wide, seed=seed)).prompt(index).text for index in range(200)}
        for seed in (0, 1)
    ]
    assert not texts[0] & texts[1]


def test_the_template_surrounds_the_question() -> None:
    stream = TaskStream(recipe(prompt="{brief} Q: {question}\nA:"))
    prompt = stream.prompt(3)
    assert prompt.text == f"{{brief}} Q: {prompt.entry['question']}\nA:"
    assert prompt.index == 3


def test_the_reference_answer_gets_the_full_reward(stream: TaskStream) -> None:
    for index in range(50):
        entry = stream.prompt(index).entry
        assert stream.score(entry, stream.answer(entry)) == 1.0
        assert stream.score(entry, f"  {stream.answer(entry)}\n") == 1.0
        assert stream.score(entry, "nothing") == 0.0
        assert stream.score(entry, "") == 0.0
    assert stream.verifier_failures == 0


def test_a_verifier_that_fails_on_a_response_gives_nothing_and_is_counted() -> None:
    stream = TaskStream(TaskRecipe(name="prime_factorization", held_out=8))
    entry = stream.prompt(0).entry
    assert stream.score(entry, "no factors here") == 0.0
    assert stream.verifier_failures == 1
    assert (stream.last_verifier_failure or "").startswith("ValueError: ")
    assert stream.score(entry, stream.answer(entry)) == 1.0
    assert stream.verifier_failures == 1


def test_a_verifier_cannot_change_the_entry_that_others_will_see(stream: TaskStream) -> None:
    prompt = stream.prompt(0)
    before = dict(prompt.entry)
    stream.score(prompt.entry, "5")
    assert prompt.entry == before == stream.prompt(0).entry


@pytest.mark.parametrize("name", ["acre", "arc_1d", "spell_backward", "gsm_symbolic"])
def test_datasets_of_every_build_give_an_endless_stream(name: str) -> None:
    """Some datasets build all their entries at once; a stream begins without waiting."""
    stream = TaskStream(TaskRecipe(name=name, held_out=4))
    held_out = {stream.held_out(index).text for index in range(4)}
    assert stream.prompt(0).text not in held_out
    assert stream.prompt(1_000_000).text not in held_out


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"name": "chain_sums"}, "no reasoning-gym dataset 'chain_sums'; did you mean chain_sum"),
        ({"name": "zzzzzz"}, "no reasoning-gym dataset 'zzzzzz'; there are "),
        ({"config": {"min_term": 2}}, "task.config.min_term: chain_sum has no such argument; did"),
        ({"config": {"zzz": 2}}, "it takes min_terms, max_terms"),
        ({"config": {"min_terms": 5, "max_terms": 2}}, "max_terms must be >= min_terms"),
        ({"config": {"min_terms": "two"}}, "task.config: chain_sum cannot be configured so"),
        ({"name": "composite", "config": {}}, "composite cannot be configured so"),
        ({"held_out": 300}, "gave only 200 different questions; lower task.held_out (300)"),
        ({"name": "list_functions", "config": {}}, "the same seed gives different entries"),
    ],
)
def test_an_impossible_task_is_one_clear_line(options: dict[str, Any], line: str) -> None:
    with pytest.raises(TaskError) as caught:
        TaskStream(recipe(**options))
    assert line in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.skipif(not sys.flags.hash_randomization, reason="hash randomisation is off")
def test_a_dataset_that_depends_on_the_hash_seed_is_refused() -> None:
    with pytest.raises(TaskError, match="start Python with PYTHONHASHSEED=0"):
        TaskStream(TaskRecipe(name="word_ladder"))


def test_a_task_that_is_wholly_held_out_says_so() -> None:
    stream = TaskStream(recipe(held_out=200))
    with pytest.raises(TaskError, match=r"gave only held-out questions; lower task\.held_out"):
        stream.prompt(0)


def test_a_task_without_reference_answers_says_so_when_asked() -> None:
    stream = TaskStream(TaskRecipe(name="graph_color", held_out=4))
    with pytest.raises(TaskError, match="set warm_start to null"):
        stream.answer(stream.prompt(0).entry)


def test_an_index_outside_the_stream_is_refused(stream: TaskStream) -> None:
    with pytest.raises(TaskError, match="prompt index -1"):
        stream.prompt(-1)
    with pytest.raises(TaskError, match=r"held-out prompt 64 is not within 0\.\.63"):
        stream.held_out(64)


def test_a_constant_prefix_of_the_questions_is_left_out() -> None:
    prefix = "State the final answer to the following arithmetic problem: "
    plain, short = TaskStream(recipe()), TaskStream(recipe(strip_prefix=prefix))
    for index in (0, 1, 2000):
        assert plain.prompt(index).text == prefix + short.prompt(index).text
        assert plain.prompt(index).entry == short.prompt(index).entry
    assert plain.held_out(3).text == prefix + short.held_out(3).text


def test_a_prefix_that_a_question_lacks_is_refused() -> None:
    stream = TaskStream(recipe(strip_prefix="Compute: "))
    with pytest.raises(TaskError, match=r"task\.strip_prefix is 'Compute: '.*prompt 0 asks 'State"):
        stream.prompt(0)
