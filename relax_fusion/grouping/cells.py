"""Which pairs of operators may be one kernel, by their mappings: 25 cells.

After DNNFusion (Niu et al., PLDI 2021, Table 3), with other cells where our rules schedule
otherwise: `tests/grouping/test_mapping.py` has both tables.
"""

from __future__ import annotations

from enum import Enum

from .mapping import Kind


class Cell(Enum):
    """``FUSE``: one kernel; ``PRICE``: where that is faster; ``BREAK``: two kernels."""

    FUSE = "fuse"
    PRICE = "price"
    BREAK = "break"


_F, _P, _B = Cell.FUSE, Cell.PRICE, Cell.BREAK

# To the right: how the second reads the first.
#                     1-1 reorg shuffle 1-m m-m
_ROWS = {
    Kind.ONE_TO_ONE: (_F, _F, _F, _P, _P),
    Kind.REORGANISE: (_F, _F, _F, _P, _P),
    Kind.SHUFFLE: (_F, _F, _F, _P, _P),
    Kind.ONE_TO_MANY: (_F, _F, _F, _P, _P),
    Kind.MANY_TO_MANY: (_F, _B, _B, _P, _B),
}
"""Where elements are read several times, what makes them would be computed several times: a price.
A sum takes what it adds up in rows of memory: of a shuffle, one that leaves rows whole.  Behind a
sum, and in the kernel that has it, each element has one place: others read it from memory, but for
the rows that it is the sum of."""

CELLS = {
    (first, second): cell
    for first, row in _ROWS.items()
    for second, cell in zip(Kind, row, strict=True)
}
"""By the kind of the first operator, and how the second one reads it."""
