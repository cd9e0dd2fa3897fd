"""A transformer block of a diffusion model (adaLN, attention, FFN), compiled ahead of time.

The block is saved, loaded and called with another number of patches than it was compiled with.

pip install -c constraints.txt '.[torch]'
python torch_diffusion_block.py
"""

import tempfile
from pathlib import Path

try:
    import torch
except ImportError as err:
    raise SystemExit("this example needs PyTorch: pip install '.[torch]'") from err

import relax_fusion.torch


class Block(torch.nn.Module):
    """A block whose norms are scaled and shifted by what is known of the step."""

    def __init__(self, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = torch.nn.ModuleList(
            torch.nn.LayerNorm(width, elementwise_affine=False) for _ in range(2)
        )
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)
        self.modulation = torch.nn.Linear(width, 6 * width)

    def forward(self, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        """Return patches, [batch, patches, width], of the same shape; `step` is [batch, width]."""
        silu = torch.nn.functional.silu(step)
        shift, scale, gate, shift2, scale2, gate2 = self.modulation(silu)[:, None].chunk(6, -1)
        y = self.norms[0](x) * (1 + scale) + shift
        q, k, v = self.qkv(y).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + gate * self.out(y.transpose(1, 2).flatten(2))
        y = self.norms[1](x) * (1 + scale2) + shift2
        return x + gate2 * self.down(torch.nn.functional.gelu(self.up(y), approximate="tanh"))


torch.manual_seed(0)
block = Block().eval()
patches = torch.export.Dim("patches", min=2, max=4096)
example = (torch.randn(2, 64, 128), torch.randn(2, 128))
compiled = relax_fusion.torch.compile(block, example, dynamic_shapes=({1: patches}, {}))
print(f"{len(compiled.report.fused)} fused kernels")

with tempfile.TemporaryDirectory() as directory:
    compiled.save(Path(directory) / "block")
    loaded = relax_fusion.torch.load(Path(directory) / "block")
    x, step = torch.randn(2, 100, 128), torch.randn(2, 128)
    with torch.inference_mode():
        print("largest difference:", f"{(loaded(x, step) - block(x, step)).abs().max():.1e}")
