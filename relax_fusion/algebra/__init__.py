"""Algebraic rules: a formula in the place of another that is the same, where that pays."""

from .rules import RULES, Rule
from .simplify import AlgebraOptions, SimplifyAlgebra

__all__ = ["RULES", "AlgebraOptions", "Rule", "SimplifyAlgebra"]
