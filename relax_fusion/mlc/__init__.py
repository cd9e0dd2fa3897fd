"""MLC-LLM with our phases: its compiler, command line and engine stay as they are.

::

    import relax_fusion.mlc

    relax_fusion.mlc.install()

Afterwards MLC-LLM's ``compile`` runs our pipeline in the place of its own;
``python -m relax_fusion.mlc compile ...`` does the same on the command line.
"""

from .package import AbsentLibraryWarning
from .phases import install, uninstall

__all__ = ["AbsentLibraryWarning", "install", "uninstall"]
