"""The door for users of PyTorch.

``torch.compile(model, backend="relax_fusion")`` finds it by itself.  Ahead of time::

    import relax_fusion.torch

    compiled = relax_fusion.torch.compile(model, (example,))
    compiled.save("out")
    result = relax_fusion.torch.load("out")(example)
"""

from .ahead import Compiled, compile, load
from .backend import relax_fusion
from .options import TorchOptions

__all__ = ["Compiled", "TorchOptions", "compile", "load", "relax_fusion"]
