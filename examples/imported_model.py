"""Bring a model from PyTorch, compile it, and compare with PyTorch.

The model is one block of a transformer.  Its sizes are fixed here; those that `dynamic_shapes` of
`torch.export` names stay symbolic.

pip install 'relax-fusion[torch]'
python imported_model.py
"""

import numpy as np
import tvm
from tvm import relax

import relax_fusion

try:
    import torch
except ImportError as err:
    raise SystemExit("this example needs PyTorch: pip install 'relax-fusion[torch]'") from err

from relax_fusion.frontends.torch import from_exported_program


class Block(torch.nn.Module):
    """Attention of four heads and a feed-forward network, each behind a norm."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of x, [batch, tokens, width]."""
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norms[1](x))))


torch.manual_seed(0)
block, x = Block().eval(), torch.randn(1, 10, 128)
mod = from_exported_program(torch.export.export(block, (x,)), unwrap_unit_return_tuple=True)

report = relax_fusion.Report()
executable = relax_fusion.build(mod, "llvm", report=report)
print(report.text())

result = relax.VirtualMachine(executable, tvm.cpu())["main"](tvm.runtime.tensor(x.numpy()))
difference = np.abs(result.numpy() - block(x).detach().numpy()).max()
print(f"chains fused: {sum(decision.fused for decision in report.decisions)}")
print(f"largest difference from PyTorch: {difference:.1e}")
