"""What a model multiplies: every matmul and attention, its sizes, and what it should cost.

    fused chains, and what was left -> items of a report -> bytes, operations, predicted times
"""

from .collect import RecordKernels, RecordWork
from .costs import LIMITS, FunctionCost, ItemCost, function_cost

__all__ = ["LIMITS", "FunctionCost", "ItemCost", "RecordKernels", "RecordWork", "function_cost"]
