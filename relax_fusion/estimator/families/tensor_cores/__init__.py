"""Tensor cores for many rows: tiles, plans, price, and the families "mma" and "wgmma"."""
