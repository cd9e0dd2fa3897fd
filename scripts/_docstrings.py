"""Docstrings of the package as the Markdown that mkdocs shows; named in `mkdocs.yml`."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":\w+:(`[^`]+`)")
LITERAL_BLOCK = re.compile(r"::\n(?=\n)")


class AsMarkdown(griffe.Extension):
    """Turn the little of reStructuredText that docstrings have into Markdown."""

    def on_instance(self, *, obj: griffe.Object, **_kwargs: Any) -> None:
        """Rewrite roles, and the double colon in front of an indented block."""
        if obj.docstring:
            text = ROLE.sub(r"\1", obj.docstring.value)
            obj.docstring.value = LITERAL_BLOCK.sub(":\n", text)
