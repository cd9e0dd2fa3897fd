"""Names in a generated kernel, which are made of those of tensors, loops and dimensions."""

from __future__ import annotations

import keyword
import re

from ...errors import TilingError
from ...tiling import Schedule
from ...workload.graph import Graph

HELPERS = ("activate", "finite", "ratio", "quotient", "remainder", "largest")
"""Functions of this package that a kernel calls."""

_KNOWN = {"tl", "triton", "range", "float", "program", *HELPERS}

_OF_TENSOR = ("", "_ptr", "_map", "_acc", "_before", "_finite", "_scale")

_NUMBER = re.compile(r"_\d+$")
"""What the second tile of a tensor has behind its name."""

_OF_LOOP = ("_start", "_at", "_in")


def refuse_names(graph: Graph, schedule: Schedule) -> None:
    """Refuse names that Python does not have, or of which a kernel would have one twice.

    Raises
    ------
    TilingError
        If there is one.
    """
    tensors = [tensor.name for tensor in graph.tensors]
    loops = [loop.name for loop in schedule.space.loops]
    taken = set(_KNOWN)
    for names, endings in ((tensors, _OF_TENSOR), (loops, _OF_LOOP), (graph.dims, ("_size",))):
        for name in names:
            own = {name + ending for ending in endings}
            first = _NUMBER.sub("", name)
            if not name.isidentifier() or keyword.iskeyword(name):
                raise TilingError(f"{name!r} is no name of Python; a kernel is written in it")
            if own & taken or (names is tensors and first != name and first in tensors):
                raise TilingError(f"{name!r} is, in a kernel, the name of something else as well")
            taken |= own
