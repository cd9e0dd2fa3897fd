"""The canonical form of a graph, which the fusing passes look at."""

from .movements import MoveReshapes
from .operators import RecogniseOperators

__all__ = ["MoveReshapes", "RecogniseOperators"]
