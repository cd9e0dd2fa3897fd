"""What a model multiplies: every matmul and attention, its sizes, and what it should cost.

Fused chains, and what was left, become items of a report; bytes, operations and predicted times
follow from these.
"""

from .costs import FunctionCost, ItemCost, function_cost

__all__ = ["FunctionCost", "ItemCost", "function_cost"]
