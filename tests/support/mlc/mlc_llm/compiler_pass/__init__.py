"""MLC-LLM's passes."""

from . import pipeline as _pipeline  # noqa: F401
