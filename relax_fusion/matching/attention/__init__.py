"""Attention, as an operator or written out, in the spellings of all front ends.

`chain` finds it; `softmax` and `steps` read it backwards to its first matmul, collecting `scores`;
`operands` and `layout` look through the movements around it, by what each axis holds;
`modifiers` tells what its masks mean (`masks`, `bands`, `hiding`), by what their elements are, once
they are `aligned` with the scores.
"""

from .chain import AttentionChain, attention_chain

__all__ = ["AttentionChain", "attention_chain"]
