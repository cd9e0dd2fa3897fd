"""The chains of operators that transformers are made of, recognised one step at a time.

Each module looks at one step (constants, activations, norms, linear, epilogue, rotation,
attention), in all the spellings in which front ends write it; its functions return a frozen
description, or None.  `rope` finds the rotations of a projection's heads behind `movements` of its
features, `rotated_results` what follows its kernel then; `projections` puts norms and matmuls
together into a match.  The passes compose them.

Attention is a family of its own, with a folder: `axes` tells it what each axis of a tensor holds,
and `elements` what its elements are.
"""
