"""Fused transformer kernels as TVM Relax passes."""
