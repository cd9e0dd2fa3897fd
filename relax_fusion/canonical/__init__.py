"""The canonical form of a graph, which the fusing passes look at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .chosen_experts import ChooseExperts
from .convolutions import MultiplyConvolutions
from .duplicates import MergeDuplicates
from .feature_parts import SplitProjections
from .float8 import WidenFloat8Products
from .imports import MendImports
from .integer_products import MultiplyBytes
from .moved_norms import MoveNorms
from .moved_views import MoveViews
from .movements import MoveReshapes
from .operators import RecogniseOperators
from .padded_rotations import PadRotations
from .rotations import FuseNormRotation
from .slices import MoveSlices
from .transposes import MoveTransposes


def _simplify_algebra(*options: Any) -> Any:
    """Return the pass of `relax_fusion.algebra`, whose frame is that of this package."""
    from ..algebra import SimplifyAlgebra

    return SimplifyAlgebra(*options)


CANONICAL: dict[str, Callable[..., Any]] = {
    "MendImports": MendImports,
    "MergeDuplicates": MergeDuplicates,
    "ChooseExperts": ChooseExperts,
    "MultiplyBytes": MultiplyBytes,
    "MultiplyConvolutions": MultiplyConvolutions,
    "MoveReshapes": MoveReshapes,
    "MoveTransposes": MoveTransposes,
    "RecogniseOperators": RecogniseOperators,
    "PadRotations": PadRotations,
    "MoveSlices": MoveSlices,
    "SplitProjections": SplitProjections,
    "MoveNorms": MoveNorms,
    "SimplifyAlgebra": _simplify_algebra,
    "FuseNormRotation": FuseNormRotation,
}
"""Every pass by name, in the order in which the pipeline runs them."""

__all__ = [
    "CANONICAL",
    "MoveViews",
    "WidenFloat8Products",
    *(n for n in CANONICAL if n != "SimplifyAlgebra"),
]
