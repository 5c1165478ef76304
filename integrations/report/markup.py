"""Pieces of HTML: sections, cards with a plot, tables. All text is escaped here."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from integrations.report.table import is_number

__all__ = ["MISSING", "card", "clipped", "disclosure", "formatted", "note", "section", "table"]

MISSING = "n/a"


def section(title: str, lead: str, cards: Sequence[str]) -> str:
    """A heading, a paragraph that says what one sees, and cards."""
    return (
        f'<section>\n<h2>{escape(title)}</h2>\n<p class="lead">{escape(lead)}</p>\n'
        f'<div class="cards">\n{chr(10).join(cards)}\n</div>\n</section>'
    )


def card(title: str, text: str, svg: str, *, wide: bool = False) -> str:
    """A plot with its title and one line on how to read it; `wide` spans both columns."""
    words = f"<p>{escape(text)}</p>" if text else ""
    labelled = svg.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)
    return (
        f'<figure class="card{" wide" if wide else ""}"><h3>{escape(title)}</h3>{words}'
        f'<div class="plot scroll">{labelled}</div></figure>'
    )


def note(text: str, *, alert: bool = False) -> str:
    """A sentence that a reader must not miss."""
    return f'<p class="note{" alert" if alert else ""}">{escape(text)}</p>'


def disclosure(title: str, content: str) -> str:
    """Content that is folded away until somebody opens it; `content` is HTML."""
    return f"<details><summary>{escape(title)}</summary><div>{content}</div></details>"


def table(headings: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts; each heading is (class of the column, title)."""
    heads = "".join(f'<th class="{kind}">{escape(title)}</th>' for kind, title in headings)
    lines = []
    for row in rows:
        pairs = zip(headings, row, strict=True)
        lines.append(
            "".join(f'<td class="{kind}">{escape(text)}</td>' for (kind, _), text in pairs)
        )
    body = "".join(f"<tr>{line}</tr>\n" for line in lines)
    return f"<table><thead><tr>{heads}</tr></thead>\n<tbody>{body}</tbody></table>"


def formatted(value: Any, form: str) -> str:
    """A number in the given format; `MISSING` for everything that is not a finite number."""
    if not is_number(value):
        return MISSING
    return format(int(value) if form.endswith("d") else value, form)


def clipped(value: object, limit: int) -> str:
    """At most `limit` characters of a text."""
    text = "" if value is None else str(value).rstrip("\n")
    return text if len(text) <= limit else text[:limit] + " …"
