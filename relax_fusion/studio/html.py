"""Elements of pages.  What comes from a model becomes text here, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TypeAlias

from ..report.tables import Table
from ..report.text_changes import Hunk
from ..validation import printable

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Browsers are told that a page has a style of its own, and neither scripts nor anything else."""

_SIGNS = {"+": "ins", "-": "del"}


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


Content: TypeAlias = "str | Iterable[Content]"
"""Text, which is escaped, or HTML, or some of either."""


def joined(content: Content, between: str = "") -> Html:
    """Return content as HTML, with `between`, which is HTML already, between its parts."""
    if isinstance(content, Html):
        return content
    if isinstance(content, str):
        return Html(escape(printable(content)))
    return Html(between.join(map(joined, content)))


def tag(name: str, *content: Content, **attributes: str) -> Html:
    """Return an element; underscores at the end of an attribute's name are dropped (``class_``)."""
    told = "".join(f' {key.rstrip("_")}="{joined(value)}"' for key, value in attributes.items())
    return Html(f"<{name}{told}>{joined(content)}</{name}>")


def link(text: str, to: str) -> Html:
    """Return a link to a place of the same page, or to a file beside it."""
    return tag("a", text, href=to)


def rows_of(rows: Sequence[Sequence[str]]) -> Html:
    """Return a table; the first row is its head."""
    head = tag("tr", [tag("th", cell) for cell in rows[0]])
    body = [tag("tr", [tag("td", cell) for cell in row]) for row in rows[1:]]
    return tag("div", tag("table", head, body), class_="wide")


def titled(table: Table) -> Html:
    """Return a table under its title; nothing where it has no rows."""
    title = tag("p", table.title) if table.title else Html("")
    return joined([title, rows_of(table.rows)]) if table else Html("")


def fold(summary: Content, *content: Content, name: str = "") -> Html:
    """Return content that is shown when its summary is clicked."""
    place = {"id": name} if name else {}
    return tag("details", tag("summary", summary), *content, **place)


def hunks(found: Iterable[Hunk]) -> Html:
    """Return the places where a text changed."""
    parts = []
    for hunk in found:
        again = f", {hunk.times} times" if hunk.times > 1 else ""
        where = tag("span", f"@@ {hunk.before}, {hunk.after}{again} @@")
        lines = [tag(_SIGNS.get(line[:1], "span"), line) for line in hunk.lines]
        parts.append(tag("pre", joined([where, *lines], "\n"), class_="diff"))
    return joined(parts)


def page(title: str, lead: Content, sections: Sequence[tuple[str, str, Content]]) -> str:
    """Return a page that loads nothing and runs nothing, with `lead` below its title.

    Each section has a name, a title and its content.
    """
    style = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
    head = [
        Html('<meta charset="utf-8">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        tag("title", f"{title} - relax_fusion"),
        tag("style", Html(style)),
    ]
    links = joined([link(text, f"#{name}") for name, text, _ in sections], " ")
    body = [tag("nav", links), tag("h1", title), tag("p", lead)]
    body += [tag("section", tag("h2", told), own, id=name) for name, told, own in sections]
    made = tag("html", tag("head", head), "\n", tag("body", joined(body, "\n")), lang="en")
    return f"<!DOCTYPE html>\n{made}\n"
