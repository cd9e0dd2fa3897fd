"""The chain engine: kernels generated from a block graph and a tiling expression."""
