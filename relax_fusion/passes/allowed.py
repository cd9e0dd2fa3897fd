"""What a user may allow, refused for targets that have no use for it."""

from __future__ import annotations

from tvm.target import Target

from ..errors import TargetError
from ..hardware.instructions import MMA, Dot
from ..hardware.target import device_of, is_cpu, is_cuda


def require_tf32(target: Target) -> None:
    """Refuse tf32 where no tensor cores multiply it.

    Raises `TargetError` if the target is not CUDA, or older than sm_80.
    """
    found = device_of(target).capabilities.matrix_instructions if is_cuda(target) else ()
    if MMA["float32"] not in found:
        raise TargetError(
            f"allow_tf32=True (--allow-tf32) needs a CUDA target, sm_80 or newer: {target}"
        )


def require_int8_rows(target: Target) -> None:
    """Refuse rows of int8 where no vectors of a CPU multiply signed bytes by unsigned ones.

    Raises `TargetError` if the target is no CPU, or has neither AVX-512 VNNI nor AVX-VNNI.
    """
    found = device_of(target).capabilities.matrix_instructions if is_cpu(target) else ()
    if not any(isinstance(i, Dot) and {i.dtype, i.other} == {"uint8", "int8"} for i in found):
        raise TargetError(
            "allow_int8_rows=True (--allow-int8-rows) needs a CPU with AVX-512 VNNI or AVX-VNNI: "
            f"{target}"
        )
