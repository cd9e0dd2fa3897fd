"""Contractions on tensor cores: kernels for many rows and for few."""
