"""One page for a browser that shows what a report knows: data first, then one renderer."""

from .data import page_data
from .render import to_html

__all__ = ["page_data", "to_html"]
