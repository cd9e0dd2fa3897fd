"""From data to a page: templates, one style and scripts, all in the file."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from . import graph_chart, numbers
from .functions import LIMITS

_TEMPLATES = Path(__file__).parent / "templates"


def made_page(template: str, scripts: Sequence[str], **data: Any) -> str:
    """Return a page.

    Parameters
    ----------
    template : str
        Its file, which extends ``base.html``.
    scripts : sequence of str
        Files that run in turn, in one scope.
    **data
        What the template is given.
    """
    script = Markup("\n").join(_file(name) for name in scripts)
    return (
        _environment().get_template(template).render(css=_file("base.css"), script=script, **data)
    )


def _file(name: str) -> Markup:
    return Markup((_TEMPLATES / name).read_text(encoding="utf-8"))


@cache
def _environment() -> Environment:
    """Return the templates' environment: what comes from a model is escaped."""
    made = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        seconds=numbers.seconds, percent=numbers.percent, scaled=numbers.scaled, count=numbers.count
    )
    made.globals.update(
        slower=numbers.slower,
        gain=numbers.gain,
        times=numbers.times,
        column=graph_chart.column,
        limit=lambda bound: LIMITS.get(bound, bound),
    )
    return made
