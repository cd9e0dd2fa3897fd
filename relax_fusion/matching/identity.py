"""Objects of TVM as keys, and what arrays of TVM hold, without a comparison or call for each.

Two Python objects may stand for one of TVM's, so ``is`` does not tell, and a dictionary that is
keyed by variables calls ``==`` of TVM at each look-up: a third of the time of matching, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import tvm_ffi

Identity: TypeAlias = int
"""``hash`` of a variable or another expression: its address.

No two that are alive have the same.  Whoever keeps one keeps the object alive, too.
"""

_Item = TypeVar("_Item")
_item: Any = tvm_ffi.get_global_func("ffi.ArrayGetItem")


def items_of(array: Sequence[_Item]) -> list[_Item]:
    """Return what an array of TVM holds; iterating over it asks for its length at each item."""
    return [_item(array, i) for i in range(len(array))]
