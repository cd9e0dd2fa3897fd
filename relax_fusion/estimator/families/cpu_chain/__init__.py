"""Chains of matmuls on a CPU: tiles, price, and the family."""
