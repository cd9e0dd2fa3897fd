"""Weights packed into panels on a CPU: tiles, price, and the family."""
