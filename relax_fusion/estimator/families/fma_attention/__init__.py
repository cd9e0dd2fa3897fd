"""Attention by tiles of fused multiply-adds: price and family."""
