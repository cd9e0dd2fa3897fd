"""Looking at what was compiled: pages, differences, workloads and benchmarks, all made of reports.

Nothing else in the package imports this.
"""

from .report_page import report_html

__all__ = ["report_html"]
