"""Passes that record for a report what each function multiplies, its graph and its kernels.

Fused chains, and what was left, become items of the report; bytes, operations and predicted times
follow from these (`relax_fusion.report.costs`).
"""
