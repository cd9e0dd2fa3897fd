"""Chains of matmuls by tensor cores: tiles, price, and the family."""
