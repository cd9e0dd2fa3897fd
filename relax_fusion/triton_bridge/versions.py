"""Which versions of Triton the bridge knows the calling convention and the metadata of."""

from __future__ import annotations

import triton

from ..errors import KernelError

MIN_TRITON = (3, 6)
"""The oldest one; every later version of the same major number is taken until it proves wrong."""


def check_triton(version: str = triton.__version__) -> None:
    """Check that `version` of Triton is one that is known.

    Raises
    ------
    KernelError
        If it is not.
    """
    parts = tuple(int(p) for p in version.split("+")[0].split(".")[:2] if p.isdigit())
    if len(parts) < 2 or parts < MIN_TRITON or parts[0] != MIN_TRITON[0]:
        wanted = ".".join(map(str, MIN_TRITON))
        raise KernelError(
            f"Triton {version} is installed; {wanted} or a newer {MIN_TRITON[0]}.x is needed"
        )
