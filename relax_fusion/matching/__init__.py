"""The chains of operators that transformers are made of, recognised one step at a time.

Each module looks at one step (constants, activations, norms, linear, epilogue, rotation,
attention), in all the spellings in which front ends write it; its functions return a frozen
description, or None.  `rope` finds the rotations of a projection's heads behind `movements` of its
features, `rotated_results` what follows its kernel then; `projections` puts norms and matmuls
together into a match.  The passes compose them.

Attention is a family of its own, with a folder: `axes` tells it what each axis of a tensor holds,
and `elements` what its elements are.
"""

from .activations import activation
from .adapter import adapted
from .constants import binary
from .epilogue import Chain, epilogue, named
from .linear import Linear, linear
from .movements import ungrouped
from .norms import normalisation
from .projections import (
    Prologue,
    made_by,
    norm_matmul,
    norm_prologue,
    plain_prologue,
    readers_of,
)
from .rope import with_rope

__all__ = [
    "Chain",
    "Linear",
    "Prologue",
    "activation",
    "adapted",
    "binary",
    "epilogue",
    "linear",
    "made_by",
    "named",
    "norm_matmul",
    "norm_prologue",
    "normalisation",
    "plain_prologue",
    "readers_of",
    "ungrouped",
    "with_rope",
]
