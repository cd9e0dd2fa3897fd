"""What was decided about each chain and each kernel: as data, as text, as JSON."""

from .coverage import Coverage, Launches, Leftover
from .decision import Decision, Scheduling
from .material import FunctionGraph, Material, Node, Source, Text
from .report import Report, graphs_text, schedules_table, validation_table
from .tables import autotune_table, coverage_table, leftovers_table

__all__ = [
    "Coverage",
    "Decision",
    "FunctionGraph",
    "Launches",
    "Leftover",
    "Material",
    "Node",
    "Report",
    "Scheduling",
    "Source",
    "Text",
    "autotune_table",
    "coverage_table",
    "graphs_text",
    "leftovers_table",
    "schedules_table",
    "validation_table",
]
