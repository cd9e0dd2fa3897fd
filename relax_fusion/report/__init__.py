"""What was decided about each chain and each kernel: as data, as text, as JSON."""

from .decision import Decision, Scheduling
from .report import Report, graphs_text, schedules_table, validation_table

__all__ = [
    "Decision",
    "Report",
    "Scheduling",
    "graphs_text",
    "schedules_table",
    "validation_table",
]
