"""What was decided about each chain and each kernel: as data, as text, as JSON."""

from .coverage import Coverage, Launches, Leftover
from .decision import Decision, Joining, LeftOut, Rewrite, Scheduling
from .item import Array, Item, Product
from .material import FunctionGraph, Material, Node, Source, Text
from .report import Report
from .tables import Table

__all__ = [
    "Array",
    "Coverage",
    "Decision",
    "FunctionGraph",
    "Item",
    "Joining",
    "Launches",
    "LeftOut",
    "Leftover",
    "Material",
    "Node",
    "Product",
    "Report",
    "Rewrite",
    "Scheduling",
    "Source",
    "Table",
    "Text",
]
