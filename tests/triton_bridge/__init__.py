"""Triton kernels as operations of Relax modules: everything that needs no GPU."""
