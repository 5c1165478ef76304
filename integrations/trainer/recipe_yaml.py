"""The YAML dialect of recipes: the YAML 1.2 core schema, without the traps of YAML 1.1.

PyYAML implements YAML 1.1, where ``1e-3`` is a text, ``no`` is false, ``010`` is eight, ``12:30``
is 750 and a repeated key silently wins over the first one. Here ``1e-3`` is a number, only ``true``
and ``false`` are booleans, ``010`` is ten, ``12:30`` is a text, and a repeated key is an error.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from integrations.errors import RecipeError

__all__ = ["parse_yaml", "to_yaml_text"]

_CORE_SCHEMA: tuple[tuple[str, str, str], ...] = (
    # tag, pattern, characters that a match can begin with
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("merge", r"<<", "<"),
)


class _Loader(yaml.SafeLoader):
    """A safe loader with the resolvers of the YAML 1.2 core schema."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[str, yaml.Mark] = {}
        for key_node, _ in node.value:
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be a plain name", key_node.start_mark
                )
            if key in seen and key != "<<":
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    f"the key {key!r} stands here a second time (first in line "
                    f"{seen[key].line + 1}); keep one of the two",
                    key_node.start_mark,
                )
            seen[key] = key_node.start_mark
        return super().construct_mapping(node, deep)

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        text = str(self.construct_scalar(node))
        base = {"0o": 8, "0x": 16}.get(text[:2])
        return int(text, 10) if base is None else int(text[2:], base)

    def construct_number(self, node: yaml.ScalarNode) -> float:
        text = str(self.construct_scalar(node)).lower()
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))


class _Dumper(yaml.SafeDumper):
    """Writes what both YAML 1.1 and 1.2 read back unchanged: quotes whatever either would take."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in _CORE_SCHEMA:
    _expression = re.compile(rf"^(?:{_pattern})$")
    _characters = [*_first, ""] if _tag == "null" else list(_first)
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _expression, _characters)
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _expression, _characters)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_integer)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_number)


def parse_yaml(text: str, source: str) -> Any:
    """Parse one YAML document.

    Args:
        text: the document.
        source: what to call it in an error, for example the file's name.

    Raises:
        RecipeError: not YAML, a repeated key, or a tag that is not plain data; one line that names
            the source, line and column.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f" line {mark.line + 1}, column {mark.column + 1}:"
        problem = error.problem or error.context or "is not valid YAML"
        raise RecipeError(f"{source}:{where} {_explain(problem)}") from error
    except yaml.YAMLError as error:
        raise RecipeError(f"{source}: {' '.join(str(error).split())}") from error
    except ValueError as error:
        raise RecipeError(f"{source}: {error}") from error
    except RecursionError as error:
        raise RecipeError(f"{source}: is nested too deeply to be a recipe") from error


def to_yaml_text(data: Any) -> str:
    """Block-style YAML of plain data, keys in their given order; `parse_yaml` gives it back."""
    return yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False
    )


def _explain(problem: str) -> str:
    """Say what a person should do about the parser's three most frequent complaints."""
    if "'\\t'" in problem:
        return f"{problem}; indent with spaces, not with tabs"
    if "mapping values are not allowed here" in problem:
        return f"{problem}; put a text that contains ': ' in quotes"
    if "could not determine a constructor for the tag" in problem:
        return f"{problem}; write plain values without a tag"
    return problem
