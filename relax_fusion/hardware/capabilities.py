"""What the instructions of a GPU offer to kernels, whatever its architecture is called."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .instructions import WARP_GROUP_MMA, MatrixInstruction


@dataclass(frozen=True)
class Capabilities:
    """What kernels ask of a GPU, beside its sizes and rates.

    Parameters
    ----------
    async_copies : bool
        Copies from global to shared memory that no thread waits for (``cp.async``).
    dependent_launch : bool
        Launches that begin before the kernel in front of them ends (programmatic dependent launch).
    clusters : bool
        Thread blocks that run together and read each other's shared memory.
    tma : bool
        A unit that copies whole tiles by a tensor map (Tensor Memory Accelerator).
    matrix_instructions : tuple of MatrixInstruction
        Entries of the tables in :mod:`.instructions` that it executes.
    """

    async_copies: bool = False
    dependent_launch: bool = False
    clusters: bool = False
    tma: bool = False
    matrix_instructions: tuple[MatrixInstruction, ...] = ()

    @cached_property
    def warp_group_mma(self) -> bool:
        """Whether groups of warps multiply matrices out of shared memory."""
        return any(i in self.matrix_instructions for i in WARP_GROUP_MMA.values())


NO_CAPABILITIES = Capabilities()
"""Those of CPUs, and of GPUs whose instructions no kernel here uses."""
