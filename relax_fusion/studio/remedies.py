"""What to do about a refusal, by its reason."""

from __future__ import annotations

from ..errors import Reason
from ..report.coverage import IS_OFF

REMEDIES: dict[Reason, str] = {
    Reason.LEAKED: "Do not return or store the tensor inside of the chain, or return it as a "
    "result of its own that a kernel in front makes.",
    Reason.MULTI_USE: "Let one reader take the tensor between the operators. If two need it, "
    "compute it twice, or accept that it is written to memory.",
    Reason.AXIS: "Normalise or reduce over the axis that the matmul sums over, which is the last "
    "one of its left operand.",
    Reason.LAYOUT: "Store the operand in a layout that the message names; transpose a weight once, "
    "before compiling.",
    Reason.SHAPE: "Change the shape to what the message asks for, or make the size that it names "
    "static.",
    Reason.DTYPE: "Cast the operands to a dtype that the message names, or leave the cast out.",
    Reason.SIDE_EFFECT: "Move the impure call out of the chain.",
    Reason.VDEVICE: "Put all operands on one virtual device.",
    Reason.ATTRIBUTE: "Use the value of the attribute that the message names.",
    Reason.MATERIALISED: "Pass the weight as a parameter, so that it is not computed at run time.",
    Reason.NOT_PROFITABLE: "Nothing, if the prediction is right: separate kernels are expected to "
    "be faster. To look at the kernel or to measure it, compile with always_fuse=True.",
    Reason.CYCLE: "Reorder the operators so that nothing inside of the chain needs its result.",
    Reason.OVERWRITTEN: "Let the update in place come behind the chain that reads the tensor.",
    Reason.OVERLAP: "Nothing: another kernel took the operator. Disable that pass to let this one "
    "have it.",
    Reason.NO_PLAN: "Compile for a device with more memory for a tile, change the size that the "
    "message names, or register a kernel family (register_family).",
    Reason.SCHEDULE: "Write the loops in a form that the message names, or add a rule.",
    Reason.MISMATCH: "Please report it: the kernel would compute something else, so the chain "
    "was left alone.",
}

BY_KIND = {
    "matmul": "Give the matmul a static k and put it behind a norm or in front of a bias, an "
    "activation or a residual in the same dataflow block.",
    "norm": "Let a matmul with a weight read the norm directly: only moves of elements, casts and "
    "biases may stand between.",
    "softmax": "Write attention as matmul, scale, mask, softmax over the last axis, matmul, or as "
    "R.nn.attention, with nothing else reading the scores.",
    "attention": "Use a form of R.nn.attention that the reason names.",
    "rope": "Rotate the result of a projection directly, with cosines and sines as operands.",
    "norm and rope": "Nothing, or what the reason names: one kernel of ours computes both.",
    "convolution": "Use one group, or more than one channel in each, and a layout that begins with "
    "the results, so that it is a matmul of patches.",
    "routing": "Choose the largest of at most 1024 along the last dimension, and compute shares of "
    "them by functions of elements, sums and softmaxes.",
    "activation": "Let the activation read the matmul's result directly, with at most a bias "
    "between.",
}
"""What to do about an operator that was left over, by its kind."""


def remedy(reason: Reason | None) -> str:
    """Return what it would take to fuse a chain that was declined for a reason."""
    return REMEDIES.get(reason, "") if reason is not None else ""


def remedy_of_leftover(kind: str, reason: str) -> str:
    """Return what it would take to fuse an operator that was left over."""
    if reason.endswith(IS_OFF):
        name = reason.removesuffix(IS_OFF)
        return f"Compile without --disable {name} (in Python: leave {name} out of disable)."
    return BY_KIND.get(kind, "")
