"""Chains of matmuls and small blocks of models."""
