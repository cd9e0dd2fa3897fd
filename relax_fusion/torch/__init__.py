"""The door for users of PyTorch.

``torch.compile(model, backend="relax_fusion")`` finds it by itself.  Ahead of time::

    import relax_fusion.torch

    compiled = relax_fusion.torch.compile(model, (example,))
    compiled.save("out")
    result = relax_fusion.torch.load("out")(example)
"""

from typing import TYPE_CHECKING, Any

from .backend import relax_fusion
from .options import TorchOptions

if TYPE_CHECKING:
    from .ahead import Compiled, compile, load

__all__ = ["Compiled", "TorchOptions", "compile", "load", "relax_fusion"]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import what compiles ahead of time when it is first asked for."""
        if name not in ("Compiled", "compile", "load"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from . import ahead

        return getattr(ahead, name)
