"""The door for users of PyTorch."""

from .backend import relax_fusion
from .options import TorchOptions

__all__ = ["TorchOptions", "relax_fusion"]
