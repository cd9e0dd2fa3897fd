"""The search space of a chain as one kernel: which loops stand where, with which tiles.

A block graph has loops and statements (:mod:`.space`).  A tiling expression orders the loops
(:mod:`.expressions`), and statements then have their places (:mod:`.placement`).  What results is a
:class:`Schedule` (:mod:`.structure`): a tree of loops, the axes of the grid, and tiles.  The method
is that of MCFuser (Zhang et al., SC'24, https://arxiv.org/abs/2506.22169), with its rules
(:mod:`.pruning`); sums that blocks share (:mod:`.split`) are not in it.  Families of kernels have
the tiles and the price.  Nothing here needs TVM.
"""

from .expressions import Expression, expressions, parse
from .placement import place
from .space import Access, IterationSpace, TileLoop, iteration_space
from .split import SplitGraph, product_parts, recomputed, split_loops, split_sum
from .structure import Compute, Load, Loop, Schedule, Store, Structure, moves

__all__ = [
    "Access",
    "Compute",
    "Expression",
    "IterationSpace",
    "Load",
    "Loop",
    "Schedule",
    "SplitGraph",
    "Store",
    "Structure",
    "TileLoop",
    "expressions",
    "iteration_space",
    "moves",
    "parse",
    "place",
    "product_parts",
    "recomputed",
    "split_loops",
    "split_sum",
]
