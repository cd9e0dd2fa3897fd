"""The canonical form of a graph, which the fusing passes look at."""

from .imports import MendImports
from .movements import MoveReshapes
from .operators import RecogniseOperators
from .rotations import FuseNormRotation

__all__ = ["FuseNormRotation", "MendImports", "MoveReshapes", "RecogniseOperators"]
