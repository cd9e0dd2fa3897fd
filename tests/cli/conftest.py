"""Fixtures that tests of commands share."""

from ..support.commands import config, quick_to_compile

__all__ = ["config", "quick_to_compile"]
