"""Tensor cores for at most 16 rows: tiles, price, and the family "few_rows"."""
