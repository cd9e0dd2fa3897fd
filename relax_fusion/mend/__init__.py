"""Mends of TVM: one file for what goes wrong; `tests/mend` says when TVM needs one no more."""
