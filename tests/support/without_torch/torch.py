"""Stands in for torch where it shall be as if it were not installed."""

raise ImportError("torch is hidden from this process")
