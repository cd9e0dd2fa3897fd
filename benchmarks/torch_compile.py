"""torch.compile as benchmarks ask for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` under torch.compile, to be tuned for the sizes it is first called with.

    What was compiled before is forgotten: it counts against a limit of recompilations.
    """
    from torch._inductor import select_algorithm

    select_algorithm.PRINT_AUTOTUNE = False
    torch._dynamo.reset()
    return torch.compile(function, mode="max-autotune-no-cudagraphs", dynamic=False)
