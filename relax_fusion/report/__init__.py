"""What was decided about each chain and each kernel: as data, as text, as JSON."""

from .coverage import Coverage, Launches, Leftover
from .decision import Decision, LeftOut, Scheduling
from .item import Array, Item, Product
from .material import FunctionGraph, Material, Node, Source, Text
from .report import Report, graphs_text
from .tables import (
    coverage_table,
    declined_table,
    left_out_table,
    leftovers_table,
    schedules_table,
    validation_table,
)

__all__ = [
    "Array",
    "Coverage",
    "Decision",
    "FunctionGraph",
    "Item",
    "Launches",
    "LeftOut",
    "Leftover",
    "Material",
    "Node",
    "Product",
    "Report",
    "Scheduling",
    "Source",
    "Text",
    "coverage_table",
    "declined_table",
    "graphs_text",
    "left_out_table",
    "leftovers_table",
    "schedules_table",
    "validation_table",
]
