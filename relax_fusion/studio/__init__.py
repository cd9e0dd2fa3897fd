"""Looking at what was compiled: pages, differences, workloads and benchmarks, all made of reports.

Nothing else in the package imports this.
"""

from ..report.costs import FunctionCost, ItemCost, function_cost
from .report_page import report_html

__all__ = ["FunctionCost", "ItemCost", "function_cost", "report_html"]
