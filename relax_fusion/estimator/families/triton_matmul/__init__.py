"""Matmuls in Triton and Gluon: plans, price, and the family."""
