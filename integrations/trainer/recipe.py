"""Read a recipe: YAML file and ``key=value`` overrides in, a validated `Recipe` out.

Every mistake is one `RecipeError` of one line that names the source, the field, the value and the
fix: ``recipes/mine.yaml: learner.step: unknown key; did you mean learner.steps?``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from integrations.errors import RecipeError
from integrations.trainer.recipe_errors import describe, problem_path, problems
from integrations.trainer.recipe_schema import CHANGEABLE_ON_RESUME, Recipe
from integrations.trainer.recipe_yaml import parse_yaml

__all__ = ["CHANGEABLE_ON_RESUME", "Recipe", "load_recipe", "parse_recipe"]

_LARGEST_FILE = 1 << 20

_SHORT_FORMS: Mapping[str, str] = {"rollout": "engine", "learner": "engine", "correction": "kind"}
"""Sections that may be written as one name, and the field that the name stands for."""


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read and validate a recipe.

    Args:
        path: a YAML file.
        overrides: ``section.key=value``, the value in YAML; applied in order over the file.

    Raises:
        RecipeError: the file cannot be read, is not YAML, or asks for something unknown, of a wrong
            type or impossible. One line.
    """
    source = str(path)
    data = parse_yaml(_read(Path(path), source), source)
    if not isinstance(data, dict):
        found = "nothing" if data is None else f"a {type(data).__name__}"
        raise RecipeError(f"{source}: holds {found}; a recipe is a mapping of keys to values")
    return parse_recipe(data, source=source, overrides=overrides)


def parse_recipe(
    data: Mapping[str, Any], *, source: str = "recipe", overrides: Sequence[str] = ()
) -> Recipe:
    """Validate a recipe that is already plain data; otherwise as `load_recipe`.

    Args:
        data: mapping of sections; not changed.
        source: what to call it in an error.
        overrides: as in `load_recipe`.
    """
    for key in data:
        if not isinstance(key, str):
            raise RecipeError(f"{source}: the key {key!r} is not a text; put it in quotes")
    merged = copy.deepcopy(dict(data))
    origins: dict[str, str] = {}
    for override in overrides:
        origins[_apply(merged, override)] = override
    try:
        return Recipe.model_validate(merged)
    except ValidationError as error:
        found = problems(error)
        path = problem_path(found[0])
        origin = _origin(path, origins)
        where = source if origin is None else f"override {origin}"
        rest = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise RecipeError(f"{where}: {path}: {describe(found[0])}{rest}") from error


def _read(path: Path, source: str) -> str:
    try:
        if path.is_dir():
            raise RecipeError(f"{source}: is a folder; name the YAML file")
        if path.stat().st_size > _LARGEST_FILE:
            raise RecipeError(f"{source}: is larger than 1 MiB, so it is not a recipe")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecipeError(f"{source}: no such file") from None
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"{source}: is not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from error
    except OSError as error:
        raise RecipeError(f"{source}: cannot be read: {error.strerror}") from error


def _apply(data: dict[str, Any], override: str) -> str:
    """Set what one override says; returns the dotted name that it sets."""
    name, equals, text = override.partition("=")
    name = name.strip()
    if not equals:
        raise RecipeError(
            f"override {override}: has no '='; write section.key=value, e.g. learner.steps=20"
        )
    *parents, key = name.split(".")
    if not key or not all(parents):
        raise RecipeError(
            f"override {override}: {name!r} is not a dotted name such as learner.steps"
        )
    value = parse_yaml(text, f"override {override}")
    section: dict[str, Any] = data
    for depth, parent in enumerate(parents):
        below: Any = section.get(parent)
        if isinstance(below, str) and depth == 0 and parent in _SHORT_FORMS:
            below = {_SHORT_FORMS[parent]: below}
        if below is None:
            below = {}
        if not isinstance(below, dict):
            reached = ".".join(parents[: depth + 1])
            raise RecipeError(
                f"override {override}: {reached} is {below!r}, which has no keys to set"
            )
        section[parent] = below
        section = below
    section[key] = value
    return name


def _origin(path: str, origins: Mapping[str, str]) -> str | None:
    """The last override that set the field at ``path``, something around it or inside it."""
    for name, override in reversed(list(origins.items())):
        if path == name or path.startswith(f"{name}.") or name.startswith(f"{path}."):
            return override
    return None
