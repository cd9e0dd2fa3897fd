"""Kernel families, a file for each kind: plans, limits, price."""
