"""`TaskStream`: an endless, reproducible stream of prompts with verifiable answers.

Entries come from a reasoning-gym dataset. Entry ``i`` is drawn from the random seed ``base + i``,
where ``base`` is a function of ``task.seed`` alone, so that a prompt index stands for the same
question in every process and after every restart. Held-out prompts have their own range of
entries, and a training entry whose question is also a held-out one is replaced by another entry,
again a function of the prompt index alone: no question is ever both trained on and evaluated.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from integrations.errors import TaskError
from integrations.trainer.recipe_sections import TaskRecipe

__all__ = ["Prompt", "TaskStream"]

_CHUNK = 1024
"""Entries of one dataset object. Some datasets build all their entries at once, so an object that
spans the whole stream would never be ready; entry ``i`` is entry ``i % 1024`` of object
``i // 1024``, whose seed is ``base + 1024 * (i // 1024)``."""

_HELD_OUT_BEGIN = 1 << 30
_REDRAW_BEGIN = 3 << 29
_REDRAW_END = 1 << 31
_REDRAWS = 256

_DEPENDS_ON_HASH_SEED = frozenset(
    {
        "isomorphic_strings",
        "knight_swap",
        "polynomial_multiplication",
        "ransom_note",
        "word_ladder",
    }
)
"""Datasets that iterate over sets of texts: another process draws other entries from the same seed,
unless Python's hash randomisation is off."""

_NOT_SEEDED = frozenset({"list_functions"})
"""Datasets that draw from Python's global generator: no seed gives the same entries twice."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Attributes:
        index: its number in the stream; training and held-out prompts are numbered separately.
        text: what the model reads: the recipe's template around the question.
        entry: the dataset's entry, for `TaskStream.score` and `TaskStream.answer`.
    """

    index: int
    text: str
    entry: Mapping[str, Any]


class TaskStream:
    """Prompts, verifier and reference answers of one task.

    Args:
        recipe: section ``task``.

    Raises:
        TaskError: reasoning-gym is not installed, there is no such dataset or argument of it, the
            entries cannot be reproduced, or it has too few questions for ``held_out``.
    """

    def __init__(self, recipe: TaskRecipe) -> None:
        self._recipe = recipe
        self._make_chunk = lru_cache(maxsize=8)(_dataset_factory(recipe))
        self._verifier = self._make_chunk(0)
        self._check_reproducible()
        self._held_out = self._draw_held_out()
        self._held_out_questions = frozenset(_question(entry) for entry in self._held_out)
        self._check_verifier()
        self._verifier_failures = 0
        self._last_verifier_failure: str | None = None

    @property
    def held_out_count(self) -> int:
        """Number of held-out prompts."""
        return len(self._held_out)

    @property
    def verifier_failures(self) -> int:
        """How often the verifier raised, or gave something that is not a reward, so far."""
        return self._verifier_failures

    @property
    def last_verifier_failure(self) -> str | None:
        """What the verifier raised last, for the log."""
        return self._last_verifier_failure

    def prompt(self, index: int) -> Prompt:
        """Training prompt ``index``, from 0 on without an end.

        Raises:
            TaskError: a negative index, or no question outside the held-out ones can be found.
        """
        if not 0 <= index < _HELD_OUT_BEGIN:
            raise TaskError(f"prompt index {index} is not within 0..{_HELD_OUT_BEGIN - 1}")
        entry = self._entry(index)
        for attempt in range(_REDRAWS):
            if _question(entry) not in self._held_out_questions:
                return self._prompt(index, entry)
            span = (_REDRAW_END - _REDRAW_BEGIN) // _REDRAWS
            entry = self._entry(_REDRAW_BEGIN + attempt * span + index % span)
        raise TaskError(
            f"task {self._recipe.name}: {_REDRAWS} draws for prompt {index} gave only held-out "
            f"questions; lower task.held_out ({self._recipe.held_out}) or widen task.config"
        )

    def held_out(self, index: int) -> Prompt:
        """Held-out prompt ``index`` of ``held_out_count``; all their questions differ.

        Raises:
            TaskError: there is no such prompt.
        """
        if not 0 <= index < len(self._held_out):
            raise TaskError(f"held-out prompt {index} is not within 0..{len(self._held_out) - 1}")
        return self._prompt(index, self._held_out[index])

    def score(self, entry: Mapping[str, Any], response: str) -> float:
        """Reward of a response, usually 0..1.

        The response is what a model happened to write, and several verifiers raise on text that
        they cannot parse. Such a response is simply wrong: its reward is 0, and it is counted in
        ``verifier_failures``. That a verifier accepts a right answer is checked at the start.

        Args:
            entry: the prompt's entry.
            response: decoded response; spaces around it are removed.
        """
        try:
            reward = float(self._verifier.score_answer(response.strip(), dict(entry)))
        except Exception as error:  # whatever a third party's parser raises on arbitrary text
            self._verifier_failures += 1
            self._last_verifier_failure = f"{type(error).__name__}: {error}"
            return 0.0
        if not math.isfinite(reward):
            self._verifier_failures += 1
            self._last_verifier_failure = f"the reward is {reward}"
            return 0.0
        return reward

    def answer(self, entry: Mapping[str, Any]) -> str:
        """The dataset's own answer, for a warm start.

        Raises:
            TaskError: this dataset has verifiers only.
        """
        answer = entry.get("answer")
        if not isinstance(answer, str):
            raise TaskError(
                f"task {self._recipe.name}: its entries carry no answer, only a verifier; "
                "set warm_start to null"
            )
        return answer

    def _entry(self, index: int) -> Mapping[str, Any]:
        chunk, offset = divmod(index, _CHUNK)
        return self._make_chunk(chunk)[offset]

    def _prompt(self, index: int, entry: Mapping[str, Any]) -> Prompt:
        question, prefix = _question(entry), self._recipe.strip_prefix
        if not question.startswith(prefix):
            raise TaskError(
                f"task.strip_prefix is {prefix!r}, but prompt {index} asks {question[:80]!r}; "
                "give a text that every question begins with, or leave it out"
            )
        # Not str.format: a question or template may well contain other braces.
        text = self._recipe.prompt.replace("{question}", question.removeprefix(prefix))
        return Prompt(index, text, entry)

    def _draw_held_out(self) -> tuple[Mapping[str, Any], ...]:
        wanted = self._recipe.held_out
        found: dict[str, Mapping[str, Any]] = {}
        draws = wanted * 16 + 1024
        for index in range(draws):
            entry = self._entry(_HELD_OUT_BEGIN + index)
            found.setdefault(_question(entry), entry)
            if len(found) == wanted:
                return tuple(found.values())
        raise TaskError(
            f"task {self._recipe.name}: {draws} draws gave only {len(found)} different questions; "
            f"lower task.held_out ({wanted}) or widen task.config"
        )

    def _check_reproducible(self) -> None:
        name = self._recipe.name
        if name in _DEPENDS_ON_HASH_SEED and sys.flags.hash_randomization:
            raise TaskError(
                f"task {name}: its entries differ from process to process because they depend on "
                "Python's hash seed; start Python with PYTHONHASHSEED=0 or choose another task"
            )
        again = _dataset_factory(self._recipe)(0)
        same = all(self._verifier[i]["question"] == again[i]["question"] for i in range(4))
        if name in _NOT_SEEDED or not same:
            raise TaskError(
                f"task {name}: the same seed gives different entries, so a resumed run would not "
                "continue where it stopped; choose another task"
            )

    def _check_verifier(self) -> None:
        entry = self._held_out[0]
        if not isinstance(entry.get("answer"), str):
            return
        try:
            reward = float(self._verifier.score_answer(entry["answer"].strip(), dict(entry)))
        except Exception as error:
            raise TaskError(
                f"task {self._recipe.name}: its verifier fails on its own answer "
                f"({type(error).__name__}: {error}); choose another task"
            ) from error
        if not reward > 0.0:
            raise TaskError(
                f"task {self._recipe.name}: its verifier gives its own answer the reward {reward}; "
                "choose another task"
            )


def _question(entry: Mapping[str, Any]) -> str:
    return str(entry["question"]).strip()


class _DatasetFactory:
    """Builds the dataset object of a chunk of entries."""

    def __init__(self, name: str, config: Mapping[str, Any], base: int) -> None:
        self._name, self._config, self._base = name, config, base

    def __call__(self, chunk: int) -> Any:
        import reasoning_gym

        seed = self._base + chunk * _CHUNK
        return reasoning_gym.create_dataset(self._name, seed=seed, size=_CHUNK, **self._config)


def _dataset_factory(recipe: TaskRecipe) -> _DatasetFactory:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise TaskError(
            f"reasoning-gym cannot be imported ({error}): pip install reasoning-gym"
        ) from error
    if recipe.name not in DATASETS:
        close = difflib.get_close_matches(recipe.name, DATASETS, n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(close)}?" if close else f"there are {', '.join(DATASETS)}"
        raise TaskError(f"task.name: there is no reasoning-gym dataset {recipe.name!r}; {hint}")
    known = [field.name for field in dataclasses.fields(DATASETS[recipe.name][1])]
    for key in recipe.config:
        if key not in known:
            names = [name for name in known if name not in ("seed", "size")]
            close = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
            hint = f"did you mean {close[0]}?" if close else f"it takes {', '.join(names)}"
            raise TaskError(f"task.config.{key}: {recipe.name} has no such argument; {hint}")
    # Neighbouring task seeds must not give the same stream shifted by one. 31 bits, because numpy's
    # generators take 32 and the index is added.
    digest = hashlib.blake2b(str(recipe.seed).encode(), digest_size=4).digest()
    factory = _DatasetFactory(recipe.name, recipe.config, int.from_bytes(digest) >> 1)
    try:
        factory(0)[0]
    except Exception as error:  # AssertionError, ValueError, TypeError: whatever its config raises
        reason = " ".join(str(error).split()) or type(error).__name__
        raise TaskError(f"task.config: {recipe.name} cannot be configured so: {reason}") from error
    return factory
