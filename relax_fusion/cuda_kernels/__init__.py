"""Kernels in CUDA C++, compiled ahead of time by NVRTC."""
