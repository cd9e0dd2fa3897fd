"""The canonical form of a graph, which the fusing passes look at."""

from .convolutions import MultiplyConvolutions
from .duplicates import MergeDuplicates
from .imports import MendImports
from .movements import MoveReshapes
from .operators import RecogniseOperators
from .rotations import FuseNormRotation
from .transposes import MoveTransposes

__all__ = [
    "FuseNormRotation",
    "MendImports",
    "MergeDuplicates",
    "MoveReshapes",
    "MoveTransposes",
    "MultiplyConvolutions",
    "RecogniseOperators",
]
