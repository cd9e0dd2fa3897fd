"""Fixtures that tests of commands share."""

from ..support.commands import checkpoint, compiled, config, quick_to_compile

__all__ = ["checkpoint", "compiled", "config", "quick_to_compile"]
