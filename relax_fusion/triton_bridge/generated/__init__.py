"""Triton kernels that are generated from a block graph and a schedule of it."""

from .launch import function_of
from .text import KernelText, Means, Parameter, kernel_text

__all__ = ["KernelText", "Means", "Parameter", "function_of", "kernel_text"]
