"""Fixtures that tests of the door share."""

from ..support.commands import quick_to_compile

__all__ = ["quick_to_compile"]
