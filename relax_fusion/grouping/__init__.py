"""Fusion plans: which operators that no pattern took become one kernel.

`mapping` says of every PrimFunc how its elements follow from those that it reads, `cells` which
pairs of operators may be one kernel, `price` whether a pair for which that depends saves time,
`plan` grows groups, and `fuse` makes functions of them.
"""

from .fuse import AnnotateOperators, FuseGroups

__all__ = ["AnnotateOperators", "FuseGroups"]
