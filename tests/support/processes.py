"""Where the processes run that a test starts."""

from __future__ import annotations

import os
from pathlib import Path


def without_torch(**variables: str) -> dict[str, str]:
    """Return an environment in which torch is not installed, as for most users.

    TVM imports torch if it can, which takes longer than all that the process is started for.

    Parameters
    ----------
    **variables : str
        Further variables of the environment.
    """
    hiding = str(Path(__file__).parent / "without_torch")
    paths = [hiding, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}
