"""Proof of matches: what a chain computes, interpreted, beside what its workload says."""

from .check import Checker, Mismatch, Unchecked, check_match

__all__ = ["Checker", "Mismatch", "Unchecked", "check_match"]
