"""The canonical form of a graph, which the fusing passes look at."""

from .imports import MendImports
from .movements import MoveReshapes
from .operators import RecogniseOperators

__all__ = ["MendImports", "MoveReshapes", "RecogniseOperators"]
