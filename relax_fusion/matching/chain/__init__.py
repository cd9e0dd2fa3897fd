"""Chains of contractions, maps and reductions, whatever they are called: regions as block graphs.

`region` grows regions of a dataflow block, `operators` says what each call
computes, `writer` writes that down as statements of a `formula`, and `graph` makes one block graph
of them.
"""

from .region import PRODUCT, Region, regions
from .writer import Written, written

__all__ = ["PRODUCT", "Region", "Written", "regions", "written"]
