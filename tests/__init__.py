"""Tests of relax_fusion, laid out like the package."""
