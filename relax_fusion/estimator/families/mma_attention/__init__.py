"""Attention by tensor cores: tiles, price, and the family."""
