"""Chains of contractions, maps and reductions, whatever they are called: regions as block graphs.

`region` grows regions of a dataflow block and has them written down: `operators` says what each
call computes, as a `formula` of an element, `writer` collects statements, and `graph` makes one
block graph of them.
"""

from .region import PRODUCT, Region, refuse_shared, regions
from .writer import Written

__all__ = ["PRODUCT", "Region", "Written", "refuse_shared", "regions"]
