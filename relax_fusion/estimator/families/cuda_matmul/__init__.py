"""Matmuls in CUDA C++ for Hopper, with tiles in steps of 8 rows and 64 features."""
