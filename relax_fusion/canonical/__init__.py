"""The canonical form of a graph, which the fusing passes look at."""

from .movements import MoveReshapes

__all__ = ["MoveReshapes"]
