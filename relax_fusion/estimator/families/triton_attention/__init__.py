"""Attention in Triton and Gluon: tiles, plans, price, and the family."""
